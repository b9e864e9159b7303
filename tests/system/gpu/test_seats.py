"""Containers with seats on one GPU take turns: starts, wakes, preemption, ends, and an agent that is away."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from kybernate.messages import agent_pb2 as wire
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.seats import RULES, SEATED, SeatsAgent, runs, seats_agent, watching
from tests.system.node_agent import short_place


@pytest.fixture
def agent(gpus: Gpus) -> Iterator[SeatsAgent]:
    with short_place() as place, seats_agent(place) as one:
        yield one


def test_two_containers_with_seats_take_turns(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with gpu.computing(ctr, flags=SEATED) as first:
        agent.becomes(first.id, "active")
        with gpu.computing(ctr, flags=SEATED) as second:  # its start waits for room
            agent.becomes(second.id, "active")
            agent.becomes(first.id, "suspended")
            first.stands_still()
            for _ in range(3):
                kybernate("wake", first.id)
                first.computes_on()
                agent.becomes(second.id, "suspended")
                kybernate("wake", second.id)
                second.computes_on()
            why = json.loads(kybernate("why", first.id, "-o", "json"))
            assert (why["status"], why["container"]) == ("suspended", first.id)
            listed = json.loads(kybernate("seats", "-o", "json"))
            assert {one["container"]: one["status"] for one in listed} == {first.id: "suspended", second.id: "active"}
        eventually(lambda: second.id not in agent.seats())
        kybernate("wake", first.id)
        first.computes_on()


def test_a_wake_waits_for_what_is_at_work_and_says_so(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with gpu.computing(ctr, flags=[*SEATED, "--annotation", "kybernate.io/priority=5"]) as first:
        kybernate("sleep", first.id)
        with gpu.computing(ctr, flags=[*SEATED, "--annotation", "kybernate.io/priority=9"]) as second:
            report = wire.ReportActivityRequest(container=second.id, in_flight=1)
            report.lasts.FromSeconds(60)
            agent.call("Activity", "ReportActivity", report)
            begun = agent.operation("Wake", wire.WakeRequest(name=first.id))
            agent.until(begun.id, lambda one: "its turn" in one.progress.waits_for)
            seat = agent.call("Seats", "GetSeat", wire.GetSeatRequest(name=first.id))
            assert (seat.status, [one.cause for one in seat.requests]) == (wire.Seat.SUSPENDED, ["operation"])
            assert seat.before == [agent.seats()[second.id].name]
            assert "its turn" in kybernate("ps", "-o", "wide") + kybernate("why", first.id)
            report.in_flight = 0
            agent.call("Activity", "ReportActivity", report)
            agent.done(begun.id)
            first.computes_on()
            agent.becomes(second.id, "suspended")


def test_calls_that_nvml_does_not_see_keep_a_turn_until_they_end(ctr: Ctr, gpus: Gpus) -> None:
    """The pretended NVML samples nothing, as a real one does of kernels that take less than 1 % of the time."""
    rules = RULES.replace("slice: 1", "slice: 3600, maximumWait: 3600")
    flags = [*SEATED, "--annotation", "kybernate.io/vram=256Mi"]
    with short_place() as place, seats_agent(place, rules=rules) as agent, gpu.holding(ctr, 1, flags=flags) as first:
        kybernate("sleep", first.id)
        with gpu.holding(ctr, 1, flags=flags) as second:
            agent.becomes(second.id, "active")
            looked = agent.call("Seats", "GetSeat", wire.GetSeatRequest(name=second.id))
            begun, asked = None, 0
            for _ in range(20_000):
                assert second.is_right()
                asked += 1
                if begun is None and looked.busy:  # from now on, the first one waits for a pause
                    begun, asked = agent.operation("Wake", wire.WakeRequest(name=first.id)), 0
                if begun is not None and asked == 400:
                    break
                looked = agent.call("Seats", "GetSeat", wire.GetSeatRequest(name=second.id))
            assert begun is not None
            assert {one.id for one in agent.operations() if one.verb != "sleep"} == {begun.id}
            agent.done(begun.id)
            assert first.is_right()
            agent.becomes(second.id, "suspended")


def test_an_agent_that_starts_again_finds_the_seats_as_they_are(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with gpu.computing(ctr, flags=SEATED) as first, gpu.computing(ctr, flags=SEATED) as second:
        agent.becomes(first.id, "suspended")
        names = {id: seat.name for id, seat in agent.seats().items()}
        agent.kill()
        gpu.ask_shim(ctr, second.id, "Suspend")
        gpu.ask_shim(ctr, first.id, "Resume")
        gpu.ask_shim(ctr, second.id, "Resume")  # no arbiter prevents it: both are active
        agent.start()
        agent.wait_ready()
        eventually(lambda: sorted(map(agent.status, names)) == ["active", "suspended"], seconds=40)
        assert {id: seat.name for id, seat in agent.seats().items()} == names
        for one in (first, second):
            kybernate("wake", one.id)
            one.computes_on()


def test_a_swap_by_command_waits_for_no_suspend_of_its_own_container(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with gpu.computing(ctr, flags=SEATED) as first, gpu.computing(ctr, flags=SEATED) as second:
        agent.becomes(second.id, "active")
        kybernate("sleep", first.id)  # so that it does not ask by its use
        kybernate("swap", second.id, first.id)
        first.computes_on()
        ended = [(one.verb, wire.OperationState.Name(one.state)) for one in agent.operations()]
        assert ended[0] == ("swap", "SUCCEEDED"), ended


def test_a_wake_that_waited_when_the_agent_died_waits_for_its_turn(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    """The new agent takes it up before it has read what computes; no two hold memory of the GPU meanwhile."""
    with gpu.computing(ctr, flags=SEATED) as first:
        kybernate("sleep", first.id)
        with gpu.computing(ctr, flags=[*SEATED, "--annotation", "kybernate.io/priority=9"]) as second:
            agent.becomes(second.id, "active")
            report = wire.ReportActivityRequest(container=second.id, in_flight=1)
            report.lasts.FromSeconds(60)
            agent.call("Activity", "ReportActivity", report)
            begun = agent.operation("Wake", wire.WakeRequest(name=first.id))
            agent.until(begun.id, lambda one: bool(one.progress.waits_for))
            with watching(gpus) as watched:
                agent.kill()
                gpu.kill_helpers()  # so that the driver answers last of all
                agent.start()
                agent.wait_ready()
                agent.done(begun.id)  # what was reported of the second has died with the agent
                first.computes_on()
                agent.becomes(second.id, "suspended")
            assert watched.together == []


def test_a_start_waits_for_an_agent_that_is_away(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    agent.kill()
    own = Ctr(ctr.runtime, ctr.namespace)
    id = own.new_id("gpu")
    waiting = subprocess.Popen(own.run_argv(id, "sleep", "1000", flags=["-d", *SEATED]))
    try:
        eventually(lambda: own.status(id) == "CREATED")
        assert waiting.poll() is None
        agent.start()
        agent.wait_ready()
        assert waiting.wait(60) == 0
        agent.becomes(id, "active")
    finally:
        waiting.kill()
        own.remove(id)


def test_a_wake_that_fails_blocks_no_other_seat(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with gpu.computing(ctr, flags=SEATED) as first, gpu.computing(ctr, flags=SEATED) as second:
        agent.becomes(first.id, "suspended")
        gpus.switch("restore:*:999")
        begun = agent.operation("Wake", wire.WakeRequest(name=first.id))
        assert agent.ended(begun.id).state == wire.FAILED
        gpus.switch("")
        kybernate("wake", second.id)
        second.computes_on()
        kybernate("wake", first.id)
        first.computes_on()


def test_containers_of_a_user_take_turns_by_use_alone(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    """Their programs have no capabilities, and compute all the time: each waits in the driver until its turn."""
    flags = [*SEATED, "--user", "1000:1000"]
    with gpu.computing(ctr, flags=flags) as first, gpu.computing(ctr, flags=flags) as second:
        with watching(gpus) as watched:
            for _ in range(2):
                for one in (first, second):
                    one.computes_on(seconds=40)
        swaps = [one for one in agent.operations() if one.verb == "swap"]
        assert [at for at, _ in watched.together if not any(runs(one, at) for one in swaps)] == []
