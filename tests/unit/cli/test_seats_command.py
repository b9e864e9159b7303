"""`kybernate seats`, `why` and `schedule`: what the arbiter knows of seats, for people and for programs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent
from tests.unit.cli.conftest import Node
from tests.unit.cli.conftest import node as node
from tests.unit.cli.test_agent_commands import at

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/schemas/kybernate.schema.json").read_text())
WAITING = wire.Seat(
    name="g0-s1", profile="one", group="G0", gpus=[0], status="SUSPENDED", since=at(1), container="c1",
    namespace="k8s.io", container_title="team/web/main", reason="g0-s0 has its turn", before=["g0-s0"],
    turn_at=at(4_000_000_000), requests=[wire.SeatRequest(cause="use", at=at(2))],
)  # fmt: skip
FREE = wire.Seat(name="g0-s2", profile="one", group="G0", gpus=[0], status="FREE", reason="no container has it")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    agent.seats = [WAITING, FREE]
    monkeypatch.setenv("KYBERNATE_AGENT", str(agent.socket))
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def test_seats_are_listed(node: Node, agent: FakeAgent) -> None:
    (listed,) = node.json("seats")
    jsonschema.validate(listed, {"$ref": "#/$defs/seat", "$defs": SCHEMA["$defs"]})
    table = node.run("seats").stdout
    assert "team/web/main" in table
    assert "g0-s0 has its turn" in table
    assert "g0-s2" not in table
    assert node.run("seats", "--all", "-o", "name").stdout.split() == ["g0-s1", "g0-s2"]
    assert "use" in node.run("seats", "-o", "wide").stdout


def test_changes_of_seats_are_followed(node: Node, agent: FakeAgent) -> None:
    end = wire.Change(revision=1, bookmark=wire.BOOKMARK_SNAPSHOT_END)
    agent.changes = [wire.Change(revision=1, seat=FREE), end, wire.Change(revision=2, seat=WAITING)]
    agent.watch_ends = True
    lines = node.run("seats", "--watch", "-o", "name", status=5).stdout.split()
    assert lines == ["g0-s1", "g0-s1"]  # the list, and the change after it


def test_why_has_the_reason_what_is_before_it_and_its_turn(node: Node, agent: FakeAgent) -> None:
    shown = node.run("why", "team/web/main").stdout
    for words in ("suspended for", "g0-s0 has its turn", "before it:", "asked by:", "use"):
        assert words in shown
    assert node.json("why", "g0-s1")["before"] == ["g0-s0"]
    assert "has no seat" in node.run("why", "other", status=3).stderr


def test_schedule_has_the_turns_of_waiting_seats(node: Node, agent: FakeAgent) -> None:
    agent.turns = [wire.Turn(seat="g0-s1", at=at(4_000_000_000), reason="its turn comes", container_title="team/web")]
    (turn,) = node.json("schedule")
    assert (turn["seat"], turn["container"], turn["reason"]) == ("g0-s1", "team/web", "its turn comes")
    assert "g0-s1" in node.run("schedule").stdout


def test_seats_need_an_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYBERNATE_AGENT", "none")
    assert "seats need an agent" in node.run("seats", status=6).stderr
    assert "seats need an agent" in node.run("why", "c1", status=6).stderr
