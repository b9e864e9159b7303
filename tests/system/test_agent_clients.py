"""The command line through a real agent, and `kybernate.self` in a container that is restored from its checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system import node_agent
from tests.system.checkpoints import PYTHON, assert_whole, counting, kybernate, refused
from tests.system.ctr import Ctr, eventually
from tests.system.node_agent import NodeAgent

INSTALLED = Path("/opt/kybernate")
SELF = "/run/kybernate/self"
LIBRARIES, NODES = Path("/usr/lib/x86_64-linux-gnu"), "/opt/node-libraries"
CHECKPOINTS = Path("/var/lib/kybernate/checkpoints")
# Has itself checkpointed at the second number, says what came of it, and counts on.
TRAINS = """
import time
import kybernate.self
for number in range(10**6):
    print(number, flush=True)
    if number == 2:
        saved = kybernate.self.checkpoint(timeout=120)
        print("saved", saved.image, saved.restored, flush=True)
    time.sleep(0.1)
"""

Run = Callable[..., str]


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    settings = f'[self_socket]\nenabled = true\npath = "{place}/own/agent.sock"\n'
    with node_agent.running(place, settings) as running:
        yield running


@pytest.fixture
def through(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command that finds the agent."""
    monkeypatch.setenv("KYBERNATE_AGENT", agent.address)
    return kybernate


def test_commands_are_the_agents_where_one_runs(agent: NodeAgent, through: Run, ours: Ctr, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with counting(ours) as witness:
        eventually(lambda: witness.id in through("ps"))
        id = through("checkpoint", witness.id, str(image), "--no-wait").strip()
        assert "succeeded" in through("wait", id)
        assert_whole(image)
        last = witness.count()
        eventually(lambda: witness.count() > last)
        (listed,) = json.loads(through("ops", witness.id, "-o", "json"))
        assert (listed["id"], listed["state"], listed["verb"]) == (id, "succeeded", "checkpoint")
        assert "succeeded" in through("cancel", id), "it cannot be stopped any more"
        found = json.loads(through("checkpoint", witness.id, str(tmp_path / "second"), "--exit", "--json"))
        assert (found["container"], found["path"]) == (witness.id, str(tmp_path / "second"))
    assert "operation.succeeded" in through("events", "operation.*")
    assert "kybernate" in through("top", "--once")

    def places() -> list[list[str]]:
        listed = json.loads(through("images", "-o", "json"))
        return [[replica["place"] for replica in one["replicas"]] for one in listed]

    eventually(lambda: [str(image)] in places())
    name = ours.new_id("again")
    try:
        restored = json.loads(through("restore", str(image), "-d", "--name", name, "--json"))
        assert restored["container"] == name
        assert ours.status(name) == "RUNNING"
    finally:
        ours.remove(name)
    assert "no container has the id or the name 'none'" in refused("kybernate", "suspend", "none")


def test_program_has_itself_checkpointed_and_learns_that_it_was_restored(
    agent: NodeAgent, through: Run, ours: Ctr, place: Path, tmp_path: Path
) -> None:
    mounts = [
        f"type=bind,src={INSTALLED},dst={INSTALLED},options=rbind:ro",
        f"type=bind,src={place}/own,dst={SELF},options=rbind:ro",
        f"type=bind,src={LIBRARIES},dst={NODES},options=rbind:ro",  # gRPC needs libstdc++, and the image has none
    ]
    flags = [word for mount in mounts for word in ("--mount", mount)] + ["--env", f"LD_LIBRARY_PATH={NODES}"]
    log, again = tmp_path / "log", tmp_path / "again"
    with counting_itself(ours, log, flags) as id:
        eventually(lambda: "saved" in log.read_text(), seconds=60)
        _, image, restored = next(line for line in log.read_text().splitlines() if "saved" in line).split()
        assert restored == "False"
        eventually(lambda: log.read_text().split()[-1] == "5")
    try:
        assert_whole(CHECKPOINTS / image)
        through("restore", image, "-d", "--name", f"{id}-again", "--log", str(again))
        eventually(lambda: "saved" in again.read_text(), seconds=60)
        assert f"saved {image} True" in again.read_text()
        eventually(lambda: "5" in again.read_text().split())
    finally:
        ours.remove(f"{id}-again")
        shutil.rmtree(CHECKPOINTS / image)


def counting_itself(ours: Ctr, log: Path, flags: list[str]) -> Any:
    """Run the program, with the installation that has its library."""
    own = Ctr(ours.runtime, ours.namespace, PYTHON)
    program = (str(INSTALLED / "bin/python"), "-c", TRAINS)
    return own.running(*program, id=own.new_id("self"), flags=["--log-uri", f"file://{log}", *flags])
