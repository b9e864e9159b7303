"""`kybernate wake` and `sleep`, with and without an agent."""

from __future__ import annotations

import os

import pytest

from kybernate_shim.messages import shim_pb2 as wire
from tests.unit.cli.conftest import Node
from tests.unit.cli.conftest import node as node


@pytest.mark.parametrize(
    ("verb", "suspended", "printed", "calls"),
    [
        ("wake", True, "trainer is active: 4.00 MiB of VRAM", ["ResumeRequest"]),
        ("wake", False, "trainer is active", []),
        ("sleep", False, "trainer is asleep: 4.00 MiB of VRAM", ["SuspendRequest"]),
        ("sleep", True, "trainer is asleep", []),
    ],
)
def test_state_is_reached_from_both_and_printed(
    node: Node, verb: str, suspended: bool, printed: str, calls: list[str]
) -> None:
    node.containerd.add("trainer")
    shim = node.shim("trainer")
    shim.add("trainer", pid=os.getpid(), suspended=suspended, cuda_pids=[os.getpid()])
    shim.answers["Resume"] = wire.ResumeResponse(vram_bytes=4 << 20)
    shim.answers["Suspend"] = wire.SuspendResponse(vram_bytes=4 << 20)
    assert node.run(verb, "trainer").stdout == printed + "\n"
    assert [type(request).__name__ for request in shim.requests] == calls
