"""Operations of shims, on real sockets, and what their traces prove after a crash."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.node.shim import ShimRefused
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.evidence import Evidence, Whole, judge
from kybernate.verbs.model import Operation, Report, Result, Seen, State, Target
from kybernate.verbs.resume import Resume
from kybernate.verbs.suspend import Suspend
from kybernate.verbs.swap import Swap
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.agent.operations.hands import ID, IGNORED, Hands
from tests.unit.cli.conftest import Node as FakeNode
from tests.unit.cli.conftest import node as node
from tests.unit.cli.saved_image import save


def test_checkpoint_is_named_to_the_shim_and_answered_with_its_numbers(
    node: FakeNode, hands: Hands, counter: Any
) -> None:
    operation = hands.operation(Checkpoint("counter", exit=True, without_rootfs=True))
    save(Path(operation.target.image))
    counter.watched = 2
    counter.containers["counter"].step = "dump"
    counter.answers["Checkpoint"] = wire.CheckpointResponse(
        path=operation.target.image, manifest_digest="sha256:1", bytes=5, frozen_ms=7, steps=[wire.Step(name="dump")]
    )
    heard: list[Report] = []
    result = hands.run(operation, heard.append)
    (request,) = counter.requests
    assert (request.operation, request.path, request.exit, request.rootfs_diff) == (
        ID,
        operation.target.image,
        True,
        False,
    )
    assert request.image_digest.startswith("sha256:")
    assert (result.image_id, result.manifest_digest, result.bytes, result.frozen_ms) == ("3f6b", "sha256:1", 5, 7)
    assert (result.vram_bytes, [step.name for step in result.steps]) == (1 << 30, ["dump"])
    assert Report("dump") in heard


PROBED = {
    "spec": {
        "containers": [{"name": "web", "livenessProbe": {"httpGet": {}, "periodSeconds": 1, "failureThreshold": 2}}]
    }
}


@pytest.mark.parametrize(
    ("asked", "pod", "seconds", "source"),
    [
        (0, PROBED, 1.8, "the liveness probe"),
        (7, PROBED, 7, ""),
        (0, PROBED | {"metadata": {"annotations": {"kybernate.io/max-freeze": "9s"}}}, 0, ""),
        (0, None, 0, ""),
    ],
    ids=["probe", "request", "annotation", "unknown pod"],
)
def test_freeze_is_limited_by_the_request_or_by_the_pods_probe(
    node: FakeNode, asked: float, pod: dict[str, Any] | None, seconds: float, source: str
) -> None:
    node.containerd.add("p" * 64, namespace="k8s.io", pod="front", kind="sandbox", sandbox="p" * 64)
    node.containerd.add("c" * 64, namespace="k8s.io", pod="front", name="web", sandbox="p" * 64)
    shim = node.shim("p" * 64, namespace="k8s.io")
    shim.answers["Checkpoint"] = wire.CheckpointResponse()
    pods = {("shop", "front"): pod}
    Hands(node, pod_of=lambda namespace, name: pods[namespace, name]).execute(
        Checkpoint("shop/front", max_freeze=asked)
    )
    (request,) = shim.requests
    assert (request.max_freeze_seconds, request.max_freeze_from) == (pytest.approx(seconds), source)


def test_suspend_and_resume_are_named_to_the_shim(hands: Hands, counter: Any) -> None:
    counter.answers["Suspend"] = wire.SuspendResponse(vram_bytes=9, arena=wire.Arena(bytes=4, reasons=["full"]))
    counter.answers["Resume"] = wire.ResumeResponse(vram_bytes=9)
    assert hands.execute(Suspend("counter", lock_timeout=1.5)) == Result(
        vram_bytes=9, arena_bytes=4, arena_reasons=("full",)
    )
    assert hands.execute(Resume("counter", room_timeout=2)).vram_bytes == 9
    suspend, resume = counter.requests
    assert (suspend.operation, suspend.timeout_ms) == (ID, 1500)
    assert (resume.operation, resume.room_timeout_ms) == (ID, 2000)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (RpcError(Code.CANCELED, "undone: canceled"), OperationUndone),
        (RpcError(Code.FAILED_PRECONDITION, "no GPU state"), ShimRefused),
    ],
)
def test_answer_of_the_shim_becomes_the_end(
    hands: Hands, counter: Any, answer: RpcError, error: type[Exception]
) -> None:
    counter.answers["Suspend"] = answer
    with pytest.raises(error) as found:
        hands.execute(Suspend("counter"))
    if isinstance(found.value, ShimRefused):
        assert found.value.state == "container counter is running"


def test_shim_that_is_gone_leaves_the_outcome_open(node: FakeNode, hands: Hands) -> None:
    node.containerd.add("orphan")
    operation = hands.operation(Suspend("orphan"))
    with pytest.raises(OutcomeUnknown):
        hands.run(operation)
    assert hands.observe(operation).seen == Seen.FAILED


def test_swap_names_each_part(node: FakeNode, hands: Hands, counter: Any) -> None:
    node.containerd.add("other")
    other = node.shim("other")
    other.add("other", phase="resume")
    counter.answers["Suspend"] = wire.SuspendResponse(vram_bytes=3)
    other.answers["Resume"] = wire.ResumeResponse(vram_bytes=5)
    operation = hands.operation(Swap("counter", "other", room_timeout=4))
    assert hands.run(operation).vram_bytes == 5
    assert counter.requests[0].operation == f"{ID}.out"
    assert (other.requests[0].operation, other.requests[0].room_timeout_ms) == (f"{ID}.in", 4000)
    assert hands.observe(operation).seen == Seen.ABSENT
    other.containers["other"].operation = f"{ID}.in"
    assert hands.observe(operation).seen == Seen.AT_WORK
    node.containerd.tasks.pop(("default", "other"))
    other.containers.clear()
    assert hands.observe(operation).seen == Seen.FAILED


def test_cancel_reaches_the_shim_that_is_at_work(hands: Hands, counter: Any) -> None:
    counter.watched = 3
    counter.answers["Suspend"] = RpcError(Code.CANCELED, "undone: canceled")
    counter.answers["Cancel"] = wire.CancelResponse()

    async def work() -> None:
        operation = await asyncio.to_thread(hands.operation, Suspend("counter"))
        running = asyncio.create_task(hands.executor.execute(operation, IGNORED))
        await _until(lambda: bool(counter.requests))
        await hands.executor.cancel(operation)
        with pytest.raises(OperationUndone):
            await running

    asyncio.run(work())
    assert [request.operation for request in counter.requests] == [ID, ID]


async def _until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110  # a fake has no event
            await asyncio.sleep(0.005)


SUSPEND = Operation(ID, Suspend("c"), Target(container="c", title="c"), 1.0, state=State.RUNNING)
CHECKPOINT = Operation(ID, Checkpoint("c"), Target(container="c", image="/i"), 1.0, state=State.RUNNING)
LAST = wire.Ended(operation=ID, outcome="succeeded", vram_bytes=5, bytes=6, path="/i")


@pytest.mark.parametrize(
    ("operation", "evidence", "seen"),
    [
        (SUSPEND, Evidence(status=wire.Container(operation=ID, step="lock")), Seen.AT_WORK),
        (SUSPEND, Evidence(status=wire.Container(operation="another")), Seen.ABSENT),
        (SUSPEND, Evidence(status=wire.Container(last=LAST)), Seen.SUCCEEDED),
        (SUSPEND, Evidence(status=wire.Container(last=wire.Ended(operation="x"), earlier=[LAST])), Seen.SUCCEEDED),
        (SUSPEND, Evidence(status=wire.Container(last=wire.Ended(operation=ID, outcome="failed"))), Seen.FAILED),
        (SUSPEND, Evidence(status=wire.Container(last=wire.Ended(operation=ID, outcome="cancelled"))), Seen.CANCELLED),
        (SUSPEND, Evidence(status=wire.Container(last=wire.Ended(operation=ID, outcome="new"))), Seen.FAILED),
        (SUSPEND, Evidence(problem="its shim is dead"), Seen.FAILED),
        (SUSPEND, Evidence(rebooted=True, status=wire.Container()), Seen.FAILED),
        (CHECKPOINT, Evidence(problem="its shim is dead"), Seen.FAILED),
    ],
)
def test_judgement_on_what_a_shim_did(operation: Operation, evidence: Evidence, seen: Seen) -> None:
    found = judge(operation, evidence)
    assert found.seen == seen
    assert (found.fault is not None) == (seen == Seen.FAILED)
    assert (found.result is not None) == (seen == Seen.SUCCEEDED)


@given(st.booleans(), st.sampled_from([None, wire.Container()]))
def test_whole_image_proves_a_checkpoint(rebooted: bool, status: wire.Container | None) -> None:
    found = judge(CHECKPOINT, Evidence(rebooted, status, "", Whole(_manifest(), "sha256:1")))
    assert found.seen == Seen.SUCCEEDED
    assert found.result is not None
    assert (found.result.path, found.result.image_id, found.result.manifest_digest) == ("/i", "3f6b", "sha256:1")


def _manifest() -> Any:
    with TemporaryDirectory() as directory:
        return save(Path(directory) / "image", signed=False)


def test_checkpoint_whose_image_is_whole_succeeded_although_the_shim_is_gone(node: FakeNode, hands: Hands) -> None:
    node.containerd.add("counter")
    operation = hands.operation(Checkpoint("counter"))
    assert hands.observe(operation).seen == Seen.FAILED
    save(Path(operation.target.image))
    assert hands.observe(operation).seen == Seen.SUCCEEDED
    shutil.rmtree(operation.target.image)
    save(Path(operation.target.image), container="another")
    assert hands.observe(operation).seen == Seen.FAILED
