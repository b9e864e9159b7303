"""What annotations ask for is done once, whatever ends meanwhile; what they cannot have is said on the pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import structlog

from kybernate.agent.journal import Journal
from kybernate.agent.kubernetes import acting
from kybernate.agent.kubernetes.acting import Acting
from kybernate.agent.kubernetes.pods import Pod, pod_of
from kybernate.agent.kubernetes.requests import SCHEMA, Asked, Requests, asked_of, mistakes_of
from kybernate.agent.kubernetes.story import Subject, Told
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.executor import Heard
from kybernate.agent.operations.store import SCHEMA as OPERATIONS
from kybernate.agent.operations.store import Wanted
from kybernate.agent.service.quota import Quota
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure, Refused
from kybernate.node.lookup import KnownContainer
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.every import VERBS
from kybernate.verbs.model import Arguments, Observation, Operation, Result, Seen, State, Target
from kybernate_shim.config import Config
from tests.fakes.api_server import a_pod
from tests.unit.agent.operations.world import Events


def the_pod(**annotations: str) -> Pod:
    found = pod_of(a_pod("web", containers=("main", "side"), **annotations))
    assert found is not None
    return found


@dataclass
class Node:
    """Containers and images, which outlive the agent. `fault` is what the next checkpoint meets."""

    root: Path
    containers: list[KnownContainer] = field(default_factory=list)
    foreign: bool = False
    images: list[str] = field(default_factory=list)
    fault: Failure | None = None
    said: list[tuple[Subject, Told]] = field(default_factory=list)
    pods: dict[tuple[str, str], Pod] = field(default_factory=dict)

    def run(self, pod: Pod, *names: str) -> None:
        for name in names:
            self.containers.append(
                KnownContainer("k8s.io", f"id-{name}", pod_namespace=pod.namespace, pod=pod.name, name=name,
                               pod_uid=pod.uid, state=wire.Container.RUNNING)
            )  # fmt: skip

    @property
    def reasons(self) -> list[str]:
        return [told.reason for _, told in self.said]

    # ---- as the engine's executor

    verbs = VERBS

    async def meant(self, arguments: Arguments) -> Arguments:
        return arguments

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        assert isinstance(arguments, Checkpoint)
        if arguments.path in self.images:
            raise Refused(f"{self.root}/images/shop/{arguments.path} exists", advice="name another place, or remove it")
        return Target(container=arguments.name, writes=arguments.path)

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        if self.fault is not None:
            raise self.fault
        self.images.append(operation.target.writes)
        return Result(path=operation.target.writes)

    async def observe(self, operation: Operation) -> Observation:
        return (
            Observation(Seen.SUCCEEDED, result=Result())
            if operation.target.writes in self.images
            else Observation(Seen.ABSENT)
        )

    async def cancel(self, operation: Operation) -> None: ...

    async def roll_back(self, operation: Operation) -> str:
        return ""


@dataclass
class Agent:
    node: Node
    engine: Engine
    acting: Acting

    async def see(self, pod: Pod) -> None:
        """Let the agent examine a pod, and whatever it begins end."""
        self.node.pods[pod.namespace, pod.name] = pod
        self.acting.changed(pod)
        await self.settled()

    async def settled(self) -> None:
        async with asyncio.timeout(20):
            while self.acting._queue or not self.acting.idle or await self._busy():  # noqa: ASYNC110  # several owners
                await asyncio.sleep(0.002)

    async def _busy(self) -> bool:
        return any(not one.final for one in await self.engine.list(Wanted()))


@asynccontextmanager
async def agent(node: Node, quota: int = 1 << 40, enabled: bool = True) -> AsyncIterator[Agent]:
    """Run an agent over the journal of the one before."""
    journal = Journal(node.root / "journal.db", (*OPERATIONS, *SCHEMA))
    engine = Engine(journal, node, events=Events())
    config = replace(Config(), checkpoint_root=node.root / "images", audit_log=node.root / "audit")
    log = structlog.wrap_logger(structlog.testing.CapturingLogger())
    found = Acting(
        engine, Requests(journal), lambda: node.containers,
        lambda one: wire.Container(state=wire.Container.RUNNING, foreign=node.foreign),
        lambda: config, lambda subject, told: node.said.append((subject, told)), lambda *key: node.pods.get(key),
        lambda: {pod.uid for pod in node.pods.values()}, lambda: enabled, Quota(lambda: quota, "kubernetes.quota"), log,
    )  # fmt: skip
    tasks = [asyncio.create_task(engine.run()), asyncio.create_task(found.run())]
    try:
        await engine.ready()
        yield Agent(node, engine, found)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        journal.close()


def test_annotation_is_done_once_whatever_is_seen_again(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")
    node.run(pod, "main", "side")

    async def run() -> None:
        async with agent(node) as one:
            await one.see(pod)
            await one.see(replace(pod, running=frozenset()))
            await one.see(pod)
        async with agent(node) as again:  # a restart
            again.acting.gone()
            await again.see(pod)
            node.images.clear()  # the image is removed: that is no new request
            await again.see(pod)
            (operation,) = await again.engine.list(Wanted())
            assert operation.state == State.SUCCEEDED
            assert (operation.arguments, operation.requester) == (
                Checkpoint("id-main", "k8s.io", "nightly"), "annotation of pod shop/web",
            )  # fmt: skip

    asyncio.run(run())
    assert node.said == []
    (line,) = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert (line["verb"], line["decision"]) == ("checkpoint", "allowed")
    assert line["reason"].startswith("annotation kybernate.io/checkpoint: operation ")
    assert line["requester"]["pod"] == "web"


def test_request_that_the_agent_had_only_noted_is_not_forgotten(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")
    node.run(pod, "main")

    async def run() -> None:
        journal = Journal(node.root / "journal.db", (*OPERATIONS, *SCHEMA))
        await Requests(journal).add(pod.uid, Asked("main", "nightly"))
        journal.close()
        async with agent(node) as one:
            await one.see(pod)

    asyncio.run(run())
    assert node.images == ["nightly"]


def test_container_that_does_not_run_yet_is_waited_for(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")

    async def run() -> None:
        async with agent(node) as one:
            await one.see(pod)
            assert node.images == []
            node.run(pod, "main")
            await one.see(pod)

    asyncio.run(run())
    assert node.images == ["nightly"]


def test_failure_is_not_repeated_until_the_annotation_is_set_again(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")
    node.run(pod, "main")
    node.fault = Failure("no")

    async def run() -> None:
        async with agent(node) as one:
            await one.see(pod)
            node.fault = None
            await one.see(replace(pod, running=frozenset()))
            assert node.images == []
            await one.see(the_pod())
            await one.see(pod)
            assert node.images == ["nightly"]
            await one.see(the_pod())  # what has succeeded is done once
            node.images.clear()
            await one.see(pod)

    asyncio.run(run())
    assert node.images == []


def test_another_name_is_another_image(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="one", checkpoint__side="two")
    node.run(pod, "main", "side")

    async def run() -> None:
        async with agent(node) as one:
            await one.see(pod)
            await one.see(the_pod(checkpoint__main="three"))

    asyncio.run(run())
    assert node.images == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("quota", "taken", "why"),
    [(0, "", "are allowed; the node's administrator removes images, or raises `kubernetes.quota`"),
     (1 << 40, "nightly", "written: nightly exists; name another place, or remove it")],
)  # fmt: skip
def test_refusal_is_said_on_the_pod_once_with_its_remedy(tmp_path: Path, quota: int, taken: str, why: str) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")
    node.run(pod, "main")
    node.images += [taken] * bool(taken)
    place = tmp_path / "images/shop/other"
    place.mkdir(parents=True)
    (place / "pages").write_bytes(b"x" * 4096)

    async def run() -> None:
        for _ in range(2):
            async with agent(node, quota) as one:
                await one.see(pod)

    asyncio.run(run())
    ((subject, told),) = node.said
    assert subject == Subject("shop", "web", "u-1", "main")
    assert told.warning
    assert told.reason == "CheckpointRefused"
    assert told.message.endswith(why)
    assert json.loads((tmp_path / "audit").read_text())["decision"] == "refused"


def test_what_a_moment_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acting, "PER_MINUTE", 1)
    monkeypatch.setattr(acting, "RETRY_SECONDS", 0.001)
    node, pod = Node(tmp_path), the_pod(checkpoint__main="one", checkpoint__side="two")
    node.run(pod, "main", "side")

    async def run() -> None:
        async with agent(node) as one:
            one.acting._buckets.seconds = 0.01
            await one.see(pod)
            async with asyncio.timeout(20):
                while len(node.images) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)

    asyncio.run(run())
    assert node.said == []


def test_pod_of_another_handler_is_warned_and_not_checkpointed(tmp_path: Path) -> None:
    node, pod = Node(tmp_path, foreign=True), the_pod(checkpoint__main="nightly", restore_from="x")
    node.run(pod, "main")

    async def run() -> None:
        async with agent(node) as one:
            await one.see(pod)
            await one.see(replace(pod, running=frozenset()))

    asyncio.run(run())
    assert node.images == []
    assert node.reasons == ["AnnotationIgnored", "AnnotationIgnored"]  # each once


def test_node_can_leave_annotations_alone(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")
    node.run(pod, "main")

    async def run() -> None:
        async with agent(node, enabled=False) as one:
            await one.see(pod)

    asyncio.run(run())
    assert node.images == []


def test_requests_of_pods_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    node, pod = Node(tmp_path), the_pod(checkpoint__main="nightly")
    node.run(pod, "main")

    async def run() -> None:
        async with agent(node) as one:
            await one.see(pod)
            assert await one.acting.requests.pods() == {"u-1"}
            node.pods.clear()
            one.acting.gone()
            async with asyncio.timeout(20):
                while await one.acting.requests.pods():  # noqa: ASYNC110  # rows of a database
                    await asyncio.sleep(0.002)

    asyncio.run(run())


# ---- what annotations mean


def test_annotation_without_a_container_is_for_the_only_one() -> None:
    alone = pod_of(a_pod("web", checkpoint="nightly"))
    assert alone is not None
    assert list(asked_of(alone)) == [Asked("main", "nightly")]
    several = the_pod(checkpoint="nightly")
    assert list(asked_of(several)) == []
    (told,) = mistakes_of(several, foreign=False, counts={"kybernate.io/checkpoint"})
    assert told.message.endswith("Use one of kybernate.io/checkpoint.main, kybernate.io/checkpoint.side")


@pytest.mark.parametrize("name", ["", "../x", "/etc/x", "a/b", ".hidden", "a b", "x" * 256, "ä"])
def test_name_that_is_none_asks_for_nothing(name: str) -> None:
    pod = the_pod(checkpoint__main=name)
    assert list(asked_of(pod)) == []
    (told,) = mistakes_of(pod, foreign=False, counts=dict(pod.annotations))
    assert told.warning
    assert len(told.message) < 400


def test_annotation_that_the_node_does_not_allow_is_named() -> None:
    (told,) = mistakes_of(the_pod(restore_from="x"), foreign=False, counts=())
    assert "`annotations` in the node's shim.toml" in told.message


def test_right_annotations_are_no_mistake() -> None:
    pod = the_pod(restore_from="x", restore_from__side="y", tcp="close", checkpoint__main="n", volumes="all")
    assert list(mistakes_of(pod, foreign=False, counts=dict(pod.annotations))) == []
