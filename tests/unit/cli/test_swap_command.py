"""`kybernate swap`: what it asks of two shims, and what it says of who is where."""

from __future__ import annotations

import pytest

from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.cli.conftest import Node
from tests.unit.cli.fake_shim import FakeShim

LEFT = wire.SuspendResponse(vram_bytes=2 << 30, steps=[wire.Step(name="arena-take", seconds=0.3, bytes=2 << 30)])
CAME = wire.ResumeResponse(vram_bytes=1 << 30, steps=[wire.Step(name="arena-give", seconds=0.2, bytes=1 << 30)])
NO_ROOM = RpcError(Code.FAILED_PRECONDITION, "GPU-1 has 1 GiB free")


@pytest.fixture
def shims(node: Node) -> tuple[FakeShim, FakeShim]:
    """The shim of `one`, which leaves, and of `two`, which comes; both succeed."""
    found = []
    for name in ("one", "two"):
        node.containerd.add(name)
        shim = node.shim(name)
        shim.add(name, phase="resume")
        shim.answers |= {"Suspend": LEFT, "Resume": CAME}
        found.append(shim)
    return found[0], found[1]


def test_answer_is_shown(node: Node, shims: tuple[FakeShim, FakeShim]) -> None:
    one, two = shims
    lines = node.run("swap", "one", "two", "--room-timeout", "2.5").stdout.splitlines()
    assert lines[:2] == ["suspended one: 2.00 GiB of VRAM", "resumed two: 1.00 GiB of VRAM"]
    assert [line.split()[0] for line in lines[2:]] == ["STEP", "arena-take", "arena-give", "together"]
    assert one.requests == [wire.SuspendRequest(id="one")]
    assert two.requests == [wire.ResumeRequest(id="two", room_timeout_ms=2500)]


def test_who_has_left_is_resumed_where_the_other_cannot_come(node: Node, shims: tuple[FakeShim, FakeShim]) -> None:
    one, two = shims
    two.answers["Resume"] = NO_ROOM
    said = node.run("swap", "one", "two", status=1).stderr
    assert "two is not resumed: GPU-1 has 1 GiB free" in said
    if one.requests:  # it may have failed before anybody left, or while it leaves
        kinds = [type(request) for request in one.requests if not isinstance(request, wire.CancelRequest)]
        assert kinds == [wire.SuspendRequest, wire.ResumeRequest]
        assert "one is resumed, and runs" in said
    else:
        assert "one keeps running" in said


def test_who_cannot_leave_stays_and_the_other_is_told_of(node: Node, shims: tuple[FakeShim, FakeShim]) -> None:
    one, two = shims
    one.answers["Suspend"] = RpcError(Code.FAILED_PRECONDITION, "no process of container one holds CUDA state")
    two.answers["Resume"] = NO_ROOM
    said = node.run("swap", "one", "two", status=1).stderr
    assert "stays suspended" in said or "one keeps running" in said


def test_nobody_changes_places_with_itself(node: Node, shims: tuple[FakeShim, FakeShim]) -> None:
    assert "cannot be swapped with itself" in node.run("swap", "one", "one", status=2).stderr
