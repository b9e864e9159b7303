"""Wake and sleep: a container gets into a state, whatever it was in; nothing is done twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kybernate.node.failure import Missing
from kybernate.node.shim import ShimRefused
from kybernate.verbs.model import Result, Target
from kybernate.verbs.node import ParkedContainer
from kybernate.verbs.restore import Restore
from kybernate.verbs.resume import Resume
from kybernate.verbs.verb import Verb
from kybernate.verbs.wake import Sleep, Wake
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.agent.operations.hands import ID, Hands
from tests.unit.cli.conftest import Node as FakeNode
from tests.unit.cli.conftest import node as node


@pytest.mark.parametrize(("suspended", "calls"), [(True, ["ResumeRequest"]), (False, [])])
def test_wake_resumes_what_is_suspended_and_leaves_what_is_active(
    hands: Hands, counter: Any, suspended: bool, calls: list[str]
) -> None:
    counter.containers["counter"].suspended = suspended
    counter.answers["Resume"] = wire.ResumeResponse(vram_bytes=9)
    result = hands.execute(Wake("counter", room_timeout=2))
    assert [type(request).__name__ for request in counter.requests] == calls
    assert result == Result(vram_bytes=9 if suspended else 0)
    for request in counter.requests:
        assert (request.operation, request.room_timeout_ms) == (ID, 2000)


@pytest.mark.parametrize(("suspended", "calls"), [(False, ["SuspendRequest"]), (True, [])])
def test_sleep_suspends_what_is_active_and_leaves_what_is_suspended(
    hands: Hands, counter: Any, suspended: bool, calls: list[str]
) -> None:
    counter.containers["counter"].suspended = suspended
    counter.containers["counter"].cuda_pids.append(4242)
    counter.answers["Suspend"] = wire.SuspendResponse(vram_bytes=9)
    result = hands.execute(Sleep("counter"))
    assert [type(request).__name__ for request in counter.requests] == calls
    assert result == Result(vram_bytes=0 if suspended else 9)


def test_container_without_cuda_is_frozen_and_thawed(node: FakeNode, hands: Hands, counter: Any) -> None:
    """It has no VRAM to move; asking again changes nothing."""
    counter.containers["counter"].state = "running"
    assert hands.execute(Sleep("counter")) == Result()
    counter.containers["counter"].state = "paused"
    assert hands.execute(Sleep("counter")) == Result()
    assert hands.execute(Wake("counter")) == Result()
    counter.containers["counter"].state = "running"
    assert hands.execute(Wake("counter")) == Result()
    assert node.containerd.calls == ["tasks.pause", "tasks.resume"]
    assert not counter.requests


def test_container_with_a_seat_that_has_no_cuda_yet_works_on(node: FakeNode, hands: Hands, counter: Any) -> None:
    counter.containers["counter"].state = "running"
    assert hands.execute(Sleep("counter", gpu_only=True)) == Result()
    assert node.containerd.calls == []
    assert not counter.requests


@pytest.mark.parametrize("known", [{"note": "its processes could not be examined"}, {"phase": "checkpoint"}])
def test_container_that_may_use_cuda_is_suspended_and_not_frozen(hands: Hands, counter: Any, known: Any) -> None:
    for name, value in known.items():
        setattr(counter.containers["counter"], name, value)
    counter.answers["Suspend"] = wire.SuspendResponse(vram_bytes=9)
    assert hands.execute(Sleep("counter")) == Result(vram_bytes=9)


@pytest.mark.parametrize(("state", "error"), [("stopped", Missing), ("running", ShimRefused)])
def test_wake_of_a_container_that_has_just_ended_finds_none(
    hands: Hands, counter: Any, state: str, error: type[Exception]
) -> None:
    operation = hands.operation(Wake("counter"))
    counter.containers["counter"].suspended = True
    counter.containers["counter"].state = state
    counter.answers["Resume"] = RpcError(Code.FAILED_PRECONDITION, "container counter cannot be resumed")
    with pytest.raises(error, match="cannot be resumed"):
        hands.run(operation)


PARKED = ParkedContainer("counter", "default", "id-1", "/log")


@pytest.mark.parametrize("verb", [Wake("counter"), Resume("counter")])
def test_parked_container_is_restored_under_its_name(node: FakeNode, verb: Verb) -> None:
    known = {"counter": PARKED}
    here = Hands(node, freed=known.get).executor._node
    assert verb.meant(here) == Restore("id-1", name="counter", namespace="default", log_path="/log")
    other = replace(verb, name="another")  # type: ignore[type-var]
    assert other.meant(here) is other


def test_parked_container_sleeps_already(node: FakeNode) -> None:
    hands = Hands(node, parked={"counter": PARKED}.get)
    assert hands.resolve(Sleep("counter")) == Target(title="counter")
    assert hands.execute(Sleep("counter")) == Result()


def test_container_that_nothing_knows_is_not_found(node: FakeNode, hands: Hands) -> None:
    for verb in (Wake("another"), Sleep("another")):
        with pytest.raises(Missing, match=r"no container has|no processes"):
            hands.resolve(verb)
    node.containerd.add("ended", image="busybox:1", state="")
    with pytest.raises(Missing, match=r"no processes|unknown to its shim"):
        hands.resolve(Sleep("ended"))
