"""The inventory of containers follows the node, whatever is lost, late or repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kybernate.agent.inventory import containerd_events, containers
from kybernate.agent.inventory.containers import SETTLED_SECONDS, Containers
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate.node.containerd import STATES
from kybernate.node.lookup import gpu_word
from tests.unit.agent.fake_node import NAMESPACE, FakeNode
from tests.unit.agent.test_hub import MemoryHistory

LABEL = {"io.kubernetes.pod.name": "web-5d8f-x2x4z", "io.kubernetes.pod.namespace": "shop"}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containerd_events, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(containerd_events, "PROBE_SECONDS", 0.001)
    monkeypatch.setattr(containers, "STEP_SECONDS", 0.001)
    monkeypatch.setattr(containers, "CONFIRM_SECONDS", 0.002)


class Agent:
    """The inventory of a node, its hub, and the durable events that it has recorded."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.hub = Hub(MemoryHistory())
        self.noted: list[tuple[str, str]] = []
        self.time = 0.0
        log = structlog.wrap_logger(structlog.testing.CapturingLogger())
        self.containers = Containers(node, self.hub, self._note, log, ask=node.ask, now=lambda: self.time)

    def _note(self, type: str, level: str, message: str, /, **about: str) -> None:
        self.noted.append((type, about.get("container", "")))

    def of(self, id: str) -> api.Container:
        return self.hub.get("container", f"{NAMESPACE}/{id}") or api.Container()

    def types(self, id: str) -> list[str]:
        return [type for type, container in self.noted if container == id]


@asynccontextmanager
async def running(node: FakeNode) -> AsyncGenerator[Agent, None]:
    agent = Agent(node)
    task = asyncio.create_task(agent.containers.run())
    try:
        await asyncio.wait_for(agent.containers.ready.wait(), 5)
        yield agent
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not look():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def with_agent(node: FakeNode, work: Callable[[Agent], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with running(node) as agent:
            await work(agent)

    asyncio.run(run())


def test_life_of_a_container_is_followed_and_recorded() -> None:
    node = FakeNode()

    async def work(agent: Agent) -> None:
        node.create("a")
        await until(lambda: agent.of("a").id)
        node.start("a")
        await until(lambda: agent.of("a").state == api.Container.RUNNING)
        node.turn("a", "PAUSED", "/tasks/paused")
        await until(lambda: agent.of("a").state == api.Container.PAUSED)
        node.turn("a", "RUNNING", "/tasks/resumed")
        await until(lambda: agent.of("a").state == api.Container.RUNNING)
        node.exit("a")
        await until(lambda: agent.of("a").state == api.Container.STOPPED)
        node.delete_task("a", lingers=True)
        await until(lambda: agent.of("a").state == api.Container.NO_TASK)
        node.delete("a")
        await until(lambda: not agent.of("a").id)
        lived = ["created", "started", "paused", "unpaused", "ended", "removed"]
        assert agent.types("a") == [f"container.{word}" for word in lived]

    with_agent(node, work)


def test_containers_that_are_there_already_are_found_without_events() -> None:
    node = FakeNode()
    node.create("a", gpu=True)
    node.start("a")
    node.statuses["a"].gpu, node.statuses["a"].suspended = "suspended", True
    node.statuses["a"].vram_bytes = 7
    node.create("b", runtime="io.containerd.runc.v2")
    node.start("b")

    async def work(agent: Agent) -> None:
        one = agent.of("a")
        assert (one.gpu, one.vram_bytes, one.foreign) == (api.Container.SUSPENDED, 7, False)
        assert (agent.of("b").state, agent.of("b").foreign) == (api.Container.RUNNING, True)
        assert agent.noted == []

    with_agent(node, work)


def test_inventory_is_ready_once_each_container_was_read() -> None:
    """A container of which nothing is known may have a seat: its wake must not be let in as one without."""
    node = FakeNode()
    node.create("a", gpu=True)
    node.start("a")
    node.unanswered = 2

    async def work(agent: Agent) -> None:
        assert agent.of("a").state == api.Container.RUNNING
        node.unanswered = 1
        assert not await agent.containers.looked_at(NAMESPACE, "a")
        assert await agent.containers.looked_at(NAMESPACE, "a")
        assert await agent.containers.looked_at(NAMESPACE, "b")
        assert [agent.containers.is_gone(NAMESPACE, id) for id in "ab"] == [False, True]

    with_agent(node, work)


def test_record_that_is_too_large_is_a_problem_of_its_container_alone() -> None:
    node = FakeNode()
    for id in ("a", "b", "c"):
        node.create(id)
        node.start(id)
    node.too_large = {"b"}

    async def work(agent: Agent) -> None:
        assert {id: agent.of(id).state for id in "abc"} == dict.fromkeys("abc", api.Container.RUNNING)
        assert "record of container b is larger" in agent.of("b").problem
        assert not agent.of("b").foreign
        assert not agent.of("a").problem + agent.of("c").problem
        node.exit("b")
        await until(lambda: agent.of("b").state == api.Container.STOPPED)

    with_agent(node, work)


def test_texts_of_a_tenant_are_short_in_messages() -> None:
    node = FakeNode()
    node.create("a")
    long = "x" * (1 << 20)
    node.annotate("a", **{"kybernate.io/workload": long, "kybernate.io/restore-from": long})
    node.records["a"].image = long
    node.start("a")

    async def work(agent: Agent) -> None:
        assert agent.of("a").ByteSize() < 1 << 14

    with_agent(node, work)


def test_suspend_behind_the_agents_back_is_noticed_and_polled_while_it_runs() -> None:
    node = FakeNode()
    node.create("a", gpu=True)
    node.start("a")

    async def work(agent: Agent) -> None:
        assert agent.of("a").gpu == api.Container.ATTACHED
        node.begin("a", "suspend")
        await until(lambda: agent.of("a").operation == "suspend")
        looks = len(node.asked)
        agent.time += 0.5
        await asyncio.sleep(0.01)
        assert len(node.asked) == looks, "looked at more often than each second"
        agent.time += 0.6
        await until(lambda: len(node.asked) > looks)
        node.end("a", "suspend", gpu="suspended", suspended=True)
        await until(lambda: agent.of("a").gpu == api.Container.SUSPENDED)
        agent.time += SETTLED_SECONDS  # the one look after the connection
        await until(lambda: agent.containers._resync > agent.time)
        await until(lambda: not agent.containers._looks)
        looks = len(node.asked)
        agent.time += 100
        await asyncio.sleep(0.01)
        assert len(node.asked) == looks, "looked at without an operation"
        assert agent.types("a") == ["container.suspended"]

    with_agent(node, work)


@pytest.mark.parametrize(
    ("verb", "outcome", "expected"),
    [
        ("checkpoint", "done", ["checkpoint.started", "container.checkpointed"]),
        ("checkpoint", "failed", ["checkpoint.started", "checkpoint.failed"]),
        ("suspend", "cancelled", ["suspend.cancelled"]),
    ],
)
def test_begin_and_end_of_an_operation_are_recorded(verb: str, outcome: str, expected: list[str]) -> None:
    node = FakeNode()
    node.create("a")
    node.start("a")

    async def work(agent: Agent) -> None:
        node.begin("a", verb)
        node.end("a", verb, outcome)
        await until(lambda: len(agent.types("a")) == len(expected))
        assert agent.types("a") == expected

    with_agent(node, work)


def test_suspend_whose_event_is_lost_with_containerd_is_recorded_once() -> None:
    node = FakeNode()
    node.create("a", gpu=True)
    node.start("a")

    async def work(agent: Agent) -> None:
        node.fall()
        node.end("a", "suspend", gpu="suspended", suspended=True)
        node.up = True
        await until(lambda: agent.of("a").gpu == api.Container.SUSPENDED)
        node.end("a", "suspend")  # the shim's queue delivers late
        node.end("a", "checkpoint")
        await until(lambda: "container.checkpointed" in agent.types("a"))
        assert agent.types("a") == ["container.suspended", "container.checkpointed"]
        assert [type for type, id in agent.noted if not id] == ["containerd.lost", "containerd.found"]

    with_agent(node, work)


def test_shim_that_does_not_answer_keeps_the_last_state_and_is_asked_more_and_more_rarely() -> None:
    node = FakeNode()
    node.create("a")
    node.start("a")

    async def work(agent: Agent) -> None:
        node.silent.add("a")
        node.turn("a", "RUNNING", "/tasks/oom")
        await until(lambda: agent.of("a").problem)
        assert agent.of("a").state == api.Container.RUNNING
        looks = []
        for _ in range(60):
            before = len(node.looked)
            agent.time += 1
            await asyncio.sleep(0.004)
            looks.append(len(node.looked) - before)
        assert 3 <= sum(looks) <= 10
        assert sum(looks[:10]) > sum(looks[30:40])
        node.silent.clear()
        agent.time += 100
        await until(lambda: not agent.of("a").problem)
        assert agent.types("a") == ["shim.lost", "shim.found"]

    with_agent(node, work)


def test_workload_comes_from_the_pod_or_from_the_containers_own_label() -> None:
    node = FakeNode()
    node.create("pod", **LABEL, **{"io.cri-containerd.kind": "sandbox", "pod-template-hash": "5d8f"})
    node.create("a", **LABEL)
    node.annotate("a", **{"io.kubernetes.cri.sandbox-id": "pod"})
    node.create("b", **{"kybernate.io/workload": "trainer"})

    async def work(agent: Agent) -> None:
        assert agent.of("a").workload == "web"
        assert agent.of("b").workload == "trainer"

    with_agent(node, work)


def test_gpus_of_a_suspended_container_are_kept() -> None:
    node = FakeNode()
    node.create("a", gpu=True)
    node.start("a")

    async def work(agent: Agent) -> None:
        key = (NAMESPACE, "a")
        agent.containers.set_gpus({key: ["GPU-1"]})
        assert agent.of("a").gpu_uuids == ["GPU-1"]
        node.end("a", "suspend", gpu="suspended", suspended=True)
        await until(lambda: agent.of("a").gpu == api.Container.SUSPENDED)
        agent.containers.set_gpus({})
        assert agent.of("a").gpu_uuids == ["GPU-1"]
        node.statuses["a"].suspended = False
        node.end("a", "resume", gpu="attached")
        await until(lambda: agent.of("a").gpu == api.Container.ATTACHED)
        agent.containers.set_gpus({})
        assert agent.of("a").gpu_uuids == []

    with_agent(node, work)


class Following(RuleBasedStateMachine):
    """Anything happens in any order, containerd falls, its events are lost; the hub ends as the node is."""

    ids = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        hurry(self.patch)
        self.patch.setattr(containers, "SETTLED_SECONDS", 1e9)  # events alone have to suffice
        self.patch.setattr(containers, "RESYNC_SECONDS", 1e9)
        self.loop = asyncio.new_event_loop()
        self.node = FakeNode()
        self.agent = Agent(self.node)
        self.task = self.loop.create_task(self.agent.containers.run())

    def turns(self, number: int) -> None:
        async def wait() -> None:
            for _ in range(number):
                await asyncio.sleep(0)

        self.loop.run_until_complete(wait())

    @initialize()
    def begin(self) -> None:
        self.node.create("a", gpu=True)
        self.node.start("a")
        self.loop.run_until_complete(until(self.agent.containers.ready.is_set))

    @invariant()
    def a_little_time_passes(self) -> None:
        self.turns(2)

    @rule(number=st.integers(0, 20))
    def time_passes(self, number: int) -> None:
        self.turns(number)

    @rule(id=ids)
    def create_or_delete(self, id: str) -> None:
        if id not in self.node.records:
            self.node.create(id, gpu=True)
        elif id not in self.node.task_of:
            self.node.delete(id)

    @rule(id=ids)
    def start_or_end(self, id: str) -> None:
        if id in self.node.task_of:
            self.node.exit(id)
            # What lingers when the agent connects is found by the look that follows later, and by no event.
            self.node.delete_task(id, lingers=self.agent.containers._connected)
        elif id in self.node.records:
            self.node.start(id)

    @rule(id=ids, state=st.sampled_from(["PAUSED", "RUNNING"]))
    def pause_or_resume(self, id: str, state: str) -> None:
        if id in self.node.task_of:
            self.node.turn(id, state, "/tasks/paused")

    @rule(id=ids, state=st.sampled_from(["suspended", "attached"]))
    def operate(self, id: str, state: str) -> None:
        if id in self.node.statuses:
            self.node.begin(id, "suspend")
            self.node.end(id, "suspend", gpu=state)

    @precondition(lambda self: self.node.up)
    @rule()
    def containerd_falls(self) -> None:
        self.node.fall()

    @precondition(lambda self: not self.node.up)
    @rule()
    def containerd_returns(self) -> None:
        self.node.up = True

    def teardown(self) -> None:
        self.node.up = True
        try:
            self.loop.run_until_complete(until(self.agrees))
        except TimeoutError:
            there, expected = self.there(), {id: self.expected(id) for id in self.node.records}
            raise AssertionError(f"the inventory has {there}, the node {expected}") from None
        finally:
            self.task.cancel()
            self.loop.run_until_complete(asyncio.wait({self.task}))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            self.patch.undo()

    def agrees(self) -> bool:
        self.agent.time += 0.01
        return self.there() == {id: self.expected(id) for id in self.node.records}

    def there(self) -> dict[str, tuple[api.Container.State, int, str]]:
        return {one.id: (one.state, one.pid, gpu_word(one.gpu)) for one in self.agent.hub.objects("container")}

    def expected(self, id: str) -> tuple[api.Container.State, int, str]:
        task = self.node.task_of.get(id)
        if task is None:
            return api.Container.NO_TASK, 0, ""
        return STATES[task.status], task.pid, self.node.statuses[id].gpu


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
