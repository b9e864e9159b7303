"""What the client of a shim makes of its answers to a cancel, and to an operation that was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Failure, TimedOut
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import NothingToCancel, Shim, ShimRefused, ShimTooOld, shim_of
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.cli.conftest import Node
from tests.unit.cli.fake_shim import FakeShim

TRAINER = KnownContainer("default", "trainer", runtime="io.containerd.kybernate.v1", state=Container.RUNNING)


@pytest.fixture
def fake(node: Node) -> FakeShim:
    return node.shim("trainer")


def talk(node: Node, what: Callable[[Shim], Awaitable[Any]]) -> Any:
    async def connected() -> Any:
        async with shim_of(TRAINER, node.containerd.address) as shim:
            return await what(shim)

    return asyncio.run(connected())


def test_cancel_returns_how_the_operation_has_ended(node: Node, fake: FakeShim) -> None:
    ended = wire.Ended(operation="op-1", verb="suspend", outcome="succeeded", vram_bytes=7)
    fake.answers["Cancel"] = wire.CancelResponse(ended=ended, container=wire.Container(id="trainer", suspended=True))
    reply = talk(node, lambda shim: shim.cancel("trainer", "op-1"))
    assert fake.requests == [wire.CancelRequest(id="trainer", operation="op-1")]
    assert (reply.ended, reply.container.suspended) == (ended, True)


def test_cancel_without_a_name_is_about_whatever_runs(node: Node, fake: FakeShim) -> None:
    fake.answers["Cancel"] = wire.CancelResponse()
    talk(node, lambda shim: shim.cancel("trainer"))
    assert fake.requests == [wire.CancelRequest(id="trainer")]


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.FAILED_PRECONDITION])
def test_cancel_of_what_does_not_run(node: Node, fake: FakeShim, code: Code) -> None:
    fake.answers["Cancel"] = RpcError(code, "operation op-1, a suspend of container trainer, has succeeded already")
    with pytest.raises(NothingToCancel, match="has succeeded already") as failed:
        talk(node, lambda shim: shim.cancel("trainer", "op-1"))
    assert failed.value.code == code.name


def test_older_shim_is_named_as_such(node: Node, fake: FakeShim) -> None:
    fake.answers["Cancel"] = RpcError(Code.UNIMPLEMENTED, "method kybernate.shim.v1.Shim/Cancel: not implemented")
    with pytest.raises(ShimTooOld, match="too old"):
        talk(node, lambda shim: shim.cancel("trainer"))


def test_undo_that_takes_longer_goes_on(node: Node, fake: FakeShim) -> None:
    fake.watched = 1  # never looked at, so never answered
    fake.answers["Cancel"] = wire.CancelResponse()
    with pytest.raises(TimedOut, match=r"0\.05 s"):
        talk(node, lambda shim: shim.cancel("trainer", timeout=0.05))


@pytest.mark.parametrize(
    "call",
    [
        lambda shim: shim.checkpoint(wire.CheckpointRequest(id="trainer", operation="op-1")),
        lambda shim: shim.suspend(wire.SuspendRequest(id="trainer", operation="op-1")),
        lambda shim: shim.resume(wire.ResumeRequest(id="trainer", operation="op-1")),
    ],
)
def test_cancelled_operation_is_an_error_of_its_own(
    node: Node, fake: FakeShim, call: Callable[[Shim], Awaitable[Any]]
) -> None:
    message = "suspend of container trainer was cancelled by uid 0 (pid 7); its processes keep running"
    for method in ("Checkpoint", "Suspend", "Resume"):
        fake.answers[method] = RpcError(Code.CANCELED, message)
    with pytest.raises(ShimRefused, match="its processes keep running") as failed:
        talk(node, call)
    assert isinstance(failed.value, Failure)
    assert fake.requests[0].operation == "op-1"
