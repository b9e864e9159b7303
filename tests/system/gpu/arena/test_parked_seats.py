"""A seat whose container is suspended is parked where host memory is short, and comes back when it is asked for."""

from __future__ import annotations

from pathlib import Path

from kybernate_shim.arena.memory import Memory
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arena import MIB, SIZE, WANTED
from tests.system.gpu.seats import CONFIGURATION, RULES, SEATED, SeatsAgent, seats_agent
from tests.system.node_agent import short_place

SHORT = RULES.replace("ramLow: 0, ramHigh: 0", "ramLow: 1Ti, ramHigh: 2Ti")


def restarted(agent: SeatsAgent, place: Path, rules: str) -> None:
    agent.stop()
    (place / "seats.yaml").write_text(CONFIGURATION.format(seats=4, rules=rules))
    agent.start()
    agent.wait_ready()


def test_seats_are_parked_where_host_memory_is_short(ctr: Ctr, gpus: Gpus) -> None:
    seated = [*SEATED, *WANTED]
    with (
        short_place() as place,
        seats_agent(place) as agent,
        gpu.computing(ctr, *gpu.command(mib=MIB), flags=seated) as first,
        gpu.computing(ctr, *gpu.command(mib=MIB), flags=seated) as second,
    ):
        agent.becomes(first.id, "suspended")
        restarted(agent, place, SHORT)
        agent.becomes(first.id, "parked")
        assert Memory(SIZE).free() == SIZE
        first.stands_still()
        agent.becomes(second.id, "active")  # what is on a GPU is not parked
        assert "parked" in kybernate("seats")
        assert any(one.verb == "park" and one.requester == "arbiter of seats" for one in agent.operations())
        restarted(agent, place, RULES)
        agent.becomes(first.id, "parked")  # as its shim says
        kybernate("wake", first.id)
        first.computes_on()
        agent.becomes(second.id, "suspended")
        kybernate("wake", second.id)
        second.computes_on()
    eventually(lambda: Memory(SIZE).free() == SIZE)
