"""`kybernate suspend` and `kybernate resume`."""

from __future__ import annotations

import os

import pytest

from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Code, RpcError
from tests.unit.cli.conftest import Node

ANSWERS = {
    "suspend": wire.SuspendResponse(vram_bytes=2 << 30, steps=[wire.Step(name="lock", seconds=0.02)]),
    "resume": wire.ResumeResponse(vram_bytes=2 << 30, steps=[wire.Step(name="unlock", seconds=0.02)]),
}
REQUESTS = {"suspend": wire.SuspendRequest, "resume": wire.ResumeRequest}


@pytest.mark.parametrize(("verb", "step", "done"), [("suspend", "lock", "suspended"), ("resume", "unlock", "resumed")])
def test_answer_is_shown(node: Node, verb: str, step: str, done: str) -> None:
    node.containerd.add("trainer")
    shim = node.shim("trainer")
    shim.answers[verb.title()] = ANSWERS[verb]
    assert node.run(verb, "trainer", "--timeout", "1.5").stdout.splitlines() == [
        f"{done} trainer: 2.00 GiB of VRAM",
        f"{'STEP':{len(step)}}   TIME",
        f"{step}   20 ms",
    ]
    assert shim.requests == [REQUESTS[verb](id="trainer", timeout_ms=1500)]
    arena = {"asked": False, "bytes": 0, "reasons": []} if verb == "suspend" else None
    assert node.json(verb, "trainer") == {
        "arena": arena,
        "namespace": "default",
        "container": "trainer",
        "vram_bytes": 2 << 30,
        "steps": [{"name": step, "seconds": 0.02, "bytes": 0, "spared_bytes": 0}],
    }


def test_what_needed_no_copy_is_told(node: Node) -> None:
    node.containerd.add("trainer")
    take = wire.Step(name="arena-take", seconds=0.1, bytes=2 << 30, spared_bytes=1800 << 20)
    node.shim("trainer").answers["Suspend"] = wire.SuspendResponse(vram_bytes=3 << 30, steps=[take])
    said = node.run("suspend", "trainer").stdout.splitlines()
    assert said[0] == "suspended trainer: 3.00 GiB of VRAM, 1.76 GiB of it unchanged or zeros"
    (step,) = node.json("suspend", "trainer")["steps"]
    assert (step["bytes"], step["spared_bytes"]) == (2 << 30, 1800 << 20)


def test_failure_says_what_became_of_the_container(node: Node) -> None:
    node.containerd.add("trainer")
    shim = node.shim("trainer")
    shim.add("trainer", pid=os.getpid(), suspended=True)
    shim.answers["Resume"] = RpcError(Code.FAILED_PRECONDITION, "GPU-1 has 1 GiB of free VRAM, 2 GiB are needed")
    result = node.run("resume", "trainer", status=4)
    assert result.stderr.splitlines() == [
        "kybernate: cannot resume trainer: GPU-1 has 1 GiB of free VRAM, 2 GiB are needed",
        "  state:  container trainer is running, its VRAM in host memory",
    ]


def test_container_that_got_less_of_the_arena_says_why(node: Node) -> None:
    node.containerd.add("trainer")
    shim = node.shim("trainer")
    shim.add("trainer")
    arena = wire.Arena(asked=True, bytes=1 << 20, reasons=["process 7: it is full"])
    shim.answers["Suspend"] = wire.SuspendResponse(vram_bytes=4 << 20, arena=arena)
    assert "arena: 1.00 MiB of 4.00 MiB: process 7: it is full" in node.run("suspend", "trainer").stdout
    told = node.json("suspend", "trainer")["arena"]
    assert told == {"asked": True, "bytes": 1 << 20, "reasons": ["process 7: it is full"]}
