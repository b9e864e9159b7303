"""A program that begins with its GPU when its container's seat has not its turn waits for that, also one of an exec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kybernate.messages import agent_pb2 as wire
from kybernate_shim.run_directory import turn_file
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import PYTHON, kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.programs import Computing, Holding
from tests.system.gpu.seats import SEATED, SeatsAgent, Watched, runs, seats_agent, watching
from tests.system.node_agent import short_place

LIBRARY = ["--annotation", "kybernate.io/vram=256Mi"]
HOLDS = ["sh", "-c", f"exec python3 {gpu.INSIDE}/holds.py 2 < /dev/null"]  # and ends
LOW, HIGH = (["--annotation", f"kybernate.io/priority={value}"] for value in (5, 9))


@pytest.fixture
def agent(gpus: Gpus) -> Iterator[SeatsAgent]:
    with short_place() as place, seats_agent(place) as one:
        yield one


def report(agent: SeatsAgent, container: Computing, requests: int) -> None:
    activity = wire.ReportActivityRequest(container=container.id, in_flight=requests)
    activity.lasts.FromSeconds(60)
    agent.call("Activity", "ReportActivity", activity)


def rest(agent: SeatsAgent, container: Computing) -> None:
    report(agent, container, 0)


@contextmanager
def at_work(agent: SeatsAgent, container: Computing) -> Iterator[None]:
    """Have a container keep its turn, as one of a higher priority does that has requests."""
    agent.becomes(container.id, "active")
    report(agent, container, 1)
    yield
    rest(agent, container)


def causes(agent: SeatsAgent, id: str) -> set[str]:
    return {one.cause for one in agent.call("Seats", "GetSeat", wire.GetSeatRequest(name=id)).requests}


def outside_swaps(agent: SeatsAgent, watched: Watched) -> list[tuple[float, list[str]]]:
    operations = agent.operations()
    for one in operations:  # shown where the test fails
        print(
            one.created.ToNanoseconds() / 1e9, one.ended.ToNanoseconds() / 1e9, one.verb, one.container_title, one.state
        )
    swaps = [one for one in operations if one.verb == "swap"]
    return [one for one in watched.together if not any(runs(swap, one[0]) for swap in swaps)]


def begins_well(container: Holding) -> None:
    assert container.told() == "ready"
    container.fill(0, 1)
    assert container.is_right()


@contextmanager
def waiting_behind(ctr: Ctr, agent: SeatsAgent) -> Iterator[tuple[Holding, Computing]]:
    """A container that begins with its GPU after its turn, and so waits for one of a higher priority."""
    with (
        gpu.holding(ctr, 1, flags=[*SEATED, *LOW, *LIBRARY], later=True) as late,
        gpu.computing(ctr, flags=[*SEATED, *HIGH]) as busy,
        at_work(agent, busy),
    ):
        agent.becomes(late.id, "suspended")
        late.begin("begin")
        eventually(lambda: causes(agent, late.id) == {"use"})
        yield late, busy


def test_container_that_begins_after_its_turn_waits_for_the_next(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with watching(gpus) as watched, waiting_behind(ctr, agent) as (late, busy):
        assert len([sizes for sizes in gpus.held().values() if sizes[0]]) == 1
        rest(agent, busy)
        begins_well(late)
        agent.becomes(busy.id, "suspended")
        assert outside_swaps(agent, watched) == []


def test_program_that_waits_for_its_turn_outlives_an_agent(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    """What was reported of the other container has died with the agent."""
    with watching(gpus) as watched, waiting_behind(ctr, agent) as (late, _):
        agent.kill()
        agent.start()
        agent.wait_ready()
        begins_well(late)
        assert outside_swaps(agent, watched) == []


def test_exec_waits_for_the_turn_of_its_container(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    with gpu.computing(ctr, flags=[*SEATED, *LOW, *LIBRARY]) as first:
        kybernate("sleep", first.id)
        with gpu.computing(ctr, flags=[*SEATED, *HIGH]) as busy, watching(gpus) as watched, at_work(agent, busy):
            with gpu.begun(*own.exec_argv(first.id, *HOLDS)) as program:
                # And "preempted", where it has used the GPU before the other container started.
                eventually(lambda: causes(agent, first.id) >= {"exec", "use"})
                assert agent.status(busy.id) == "active"
                assert program.poll() is None
                assert outside_swaps(agent, watched) == []
                rest(agent, busy)
                said, _ = program.communicate(timeout=60)
                assert said == "ready\n"
            first.computes_on(seconds=40)


def test_container_with_a_seat_and_the_library_is_restored(
    ctr: Ctr, gpus: Gpus, agent: SeatsAgent, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    with gpu.holding(ctr, 1, flags=[*SEATED, *LIBRARY]) as container:
        kybernate("checkpoint", container.id, str(image), "--exit")
        with gpu.holding_again(ctr, image, container, flags=[*SEATED, *LIBRARY]):
            assert container.is_right()
            assert turn_file(ctr.namespace, container.id).exists()
        with gpu.holding_again(ctr, image, container, flags=LIBRARY):
            assert container.is_right(), "without a seat"


def test_file_of_its_turn_is_gone_with_its_container(ctr: Ctr, gpus: Gpus, agent: SeatsAgent) -> None:
    with gpu.holding(ctr, 1, flags=[*SEATED, *LIBRARY]) as container:
        assert turn_file(ctr.namespace, container.id).stat().st_mode & 0o777 == 0o644
        own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
        assert "Read-only" in own.exec(container.id, "sh", "-c", "(echo x > /dev/kybernate-turn) 2>&1 || true")
    eventually(lambda: not turn_file(ctr.namespace, container.id).exists())
