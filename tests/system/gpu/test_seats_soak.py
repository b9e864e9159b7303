"""Twelve containers share one GPU by seats, while agent, CUDA helper, shim daemons and containerd are killed in turn.

The pretended driver's own accounts say who holds memory of the GPU: never two at the same time, but for the two sides
of a swap while that runs. Each container checks its memory after each step. `KYBERNATE_SOAK=600` is for ten minutes,
`KYBERNATE_SOAK_MIB=64` for larger containers, on a GPU of four times as much.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from kybernate.messages import agent_pb2 as wire
from tests.fakes.cuda import Gpus
from tests.lab.node import Containerd
from tests.system import gpu
from tests.system.checkpoints import shim_of as daemon_of
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.programs import Computing
from tests.system.gpu.seats import SEATED, SeatsAgent, runs, seats_agent, watching
from tests.system.node_agent import short_place

SECONDS = float(os.environ.get("KYBERNATE_SOAK", "25"))
CONTAINERS = 12
MIB = int(os.environ.get("KYBERNATE_SOAK_MIB", "8"))
MAXIMUM_WAIT = 30
RULES = (
    f"minimumResidency: 0.2, slice: 0.5, yieldAfter: 0.1, idleAfter: 5, maximumWait: {MAXIMUM_WAIT}, reserve: 8Mi,"
    " ramLow: 0, ramHigh: 0"
)


@pytest.fixture
def agent(gpus: Gpus) -> Iterator[SeatsAgent]:
    file = gpus.directory / "gpus"
    before = file.read_text()
    if MIB >= 32:
        file.write_text(before.replace(f" {gpus.free(0)} ", f" {4 * MIB << 20} "))
    with short_place() as place, seats_agent(place, seats=CONTAINERS, rules=RULES) as one:
        yield one
    file.write_text(before)


def test_soak(ctr: Ctr, gpus: Gpus, agent: SeatsAgent, containerd: Containerd) -> None:
    chance = random.Random(int(os.environ.get("KYBERNATE_SOAK_SEED", "1")))
    with ExitStack() as stack:
        containers = [
            stack.enter_context(gpu.computing(ctr, *gpu.command(mib=MIB, pause_ms=20), flags=SEATED, polls=False))
            for _ in range(CONTAINERS)
        ]
        before = {one.id: one.steps()[0] for one in containers}
        # From here on: one whose turn ends before it has used its GPU may use it once meanwhile (docs/seats.md).
        watched = stack.enter_context(watching(gpus))
        faults = {
            "agent": lambda: killed(agent),
            "helper": gpu.kill_helpers,
            "daemon": lambda: end_daemon(ctr, containers),
            "containerd": lambda: end_containerd(containerd),
        }
        until, turn = time.monotonic() + SECONDS, 0
        struck: list[tuple[float, str]] = []
        fault_every = max(4.0, SECONDS / (2 * len(faults)))
        next_fault = time.monotonic() + fault_every
        while time.monotonic() < until:
            wish(agent, chance, containers)
            if time.monotonic() >= next_fault:
                name = list(faults)[turn % len(faults)]
                struck.append((time.time(), name))
                faults[name]()
                turn, next_fault = turn + 1, time.monotonic() + fault_every
            time.sleep(chance.uniform(0.05, 0.3))
        assert turn >= len(faults), "not each fault was made"
        worked = {one.id: one.steps()[0] - before[one.id] for one in containers}
        for one in containers:  # each gets its turn, and its figures are right
            eventually(lambda one=one: woken(agent, one), seconds=60)  # type: ignore[misc]
            one.computes_on(seconds=40)
            assert one.steps()[0] > before[one.id]
        swaps = [one for one in agent.operations() if one.verb == "swap"]
        outside = [one for one in watched.together if not any(runs(swap, one[0]) for swap in swaps)]
        assert outside == [], f"held memory of the GPU together; {len(swaps)} swaps\n{told(agent, outside, struck)}"
        assert not [one for one in watched.together if len(one[1]) > 2]
        print(f"{watched.looks} looks at the GPU, {turn} faults; {figures(agent, worked)}")


def told(agent: SeatsAgent, outside: list[tuple[float, list[str]]], struck: list[tuple[float, str]]) -> str:
    """Return what happened around the first time at which more than one held memory."""
    first = outside[0][0]
    lines = [f"{one[0]:.3f} {' '.join(one[1])}" for one in outside]
    lines += [f"{at:.3f} the {name} is killed" for at, name in struck]
    for one in agent.operations():
        ends = f"{seconds(one.started):.3f} to {seconds(one.ended):.3f}"
        state = wire.OperationState.Name(one.state)
        lines.append(f"{seconds(one.created):.3f} {ends} {one.verb} {one.container_title} {state} {[*one.notes]}")
    return "\n".join(line for line in sorted(lines) if abs(float(line.split()[0]) - first) < 5)


def figures(agent: SeatsAgent, worked: dict[str, int]) -> str:
    """Return how containers shared the GPU: by their steps, and by the time until wakes had ended.

    Wakes have deadlines of two or twenty seconds here; those that have missed theirs are counted apart.
    """
    found = agent.operations()
    wakes = [one for one in found if one.verb == "wake"]
    waits = sorted(seconds(one.ended) - seconds(one.created) for one in wakes if one.state == wire.SUCCEEDED)
    switches = sum(one.verb in ("swap", "sleep") and one.state == wire.SUCCEEDED for one in found)
    steps = list(worked.values())
    fairness = sum(steps) ** 2 / (len(steps) * sum(one * one for one in steps))
    return (
        f"{switches} switches, {sum(steps)} steps of {len(steps)}, fairness {fairness:.3f}, {len(waits)} of"
        f" {len(wakes)} wakes within {median(waits):.2f} s (median), {waits[int(len(waits) * 0.99)]:.2f} s (P99)"
        f" and {waits[-1]:.2f} s"
    )


def seconds(at: Timestamp) -> float:
    return at.ToNanoseconds() / 1e9


def wish(agent: SeatsAgent, chance: random.Random, containers: list[Computing]) -> None:
    """Ask for something that may fail: a wake, a sleep, or requests in flight."""
    one = chance.choice(containers)
    try:
        match chance.randrange(6):
            case 0:
                agent.call("Operations", "Sleep", wire.SleepRequest(name=one.id), seconds=5)
            case 1:
                report = wire.ReportActivityRequest(container=one.id, in_flight=1)
                report.lasts.FromMilliseconds(500)
                agent.call("Activity", "ReportActivity", report, seconds=5)
            case _:
                options = wire.Options()
                options.deadline.FromSeconds(chance.choice((2, 20)))
                agent.call("Operations", "Wake", wire.WakeRequest(name=one.id, options=options), seconds=5)
    except grpc.RpcError as error:
        print(f"{one.id}: {error.code().name} {error.details()}")


def woken(agent: SeatsAgent, one: Computing) -> bool:
    """Wake a container to the end; False where that has failed."""
    begun = agent.operation("Wake", wire.WakeRequest(name=one.id))
    found = agent.ended(begun.id, seconds=60)
    assert found.state == wire.SUCCEEDED, found.error.message
    return agent.status(one.id) == "active"


def killed(agent: SeatsAgent) -> None:
    agent.kill()
    agent.start()
    agent.wait_ready(seconds=60)


def end_daemon(ctr: Ctr, containers: list[Computing]) -> None:
    """Kill the daemon of a container's shim, which ends the container: its seat is for others then."""
    one = containers.pop()
    daemon_of(ctr, one.id).kill()


def end_containerd(containerd: Containerd) -> None:
    containerd.kill()
    containerd.start()
    containerd.wait_ready()
