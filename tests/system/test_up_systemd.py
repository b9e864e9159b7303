"""`kybernate up -d` as a service of a real systemd, over the node's own containerd and an agent of it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documentation import block
from tests.system import node_agent, up_machine
from tests.system.ctr import eventually
from tests.system.systemd import Systemd, systemd
from tests.system.up_machine import PROJECT, Machine, loaded, of_image

UNIT = f"kybernate-up-{PROJECT}.service"


@dataclass
class Booted:
    """A machine with systemd. What is asked of `kybernate` is asked under it."""

    machine: Machine
    manager: Systemd

    def kybernate(self, *words: str, status: int = 0) -> str:
        command = ("kybernate", *words, str(self.machine.file))
        return self.manager.run("env", "SET_HERE=yes", *command, "--agent", self.machine.agent.address, status=status)

    def containers(self) -> dict[str, str]:
        return {name: one.container for name, one in self.machine.pods().items()}


@pytest.fixture
def booted(tmp_path: Path) -> Iterator[Booted]:
    sockets = tmp_path / "containerd"  # the manager has a /run of its own
    sockets.mkdir()
    subprocess.run(["mount", "--bind", "/run/containerd", sockets], check=True)
    try:
        with (
            node_agent.short_place() as place,
            node_agent.running(place) as agent,
            up_machine.machine(tmp_path, agent) as machine,
            systemd(block("docs/agent.md", "units")) as manager,
        ):
            own = "kybernate-agent.socket kybernate-agent.service containerd.service"
            manager.sh(f"systemctl disable --now {own}; systemctl mask --runtime {own}")
            manager.sh(f"mkdir -p /run/containerd; mount --bind {sockets} /run/containerd")
            yield Booted(machine, manager)
    finally:
        subprocess.run(["umount", sockets], check=True)


def test_service_keeps_the_models_and_down_removes_it(booted: Booted) -> None:
    machine, manager = booted.machine, booted.manager
    machine.write(of_image("one"))
    assert f"journalctl -u {UNIT}" in booted.kybernate("up", "-d")
    shown = manager.show(UNIT)
    assert (shown["ActiveState"], shown["UnitFileState"]) == ("active", "enabled")
    first = eventually(lambda: loaded("one"), seconds=90)
    eventually(lambda: "one: ready at" in manager.journal(UNIT), seconds=90)
    before = booted.containers()

    manager.kill(signal.SIGKILL, UNIT)
    eventually(lambda: manager.show(UNIT)["NRestarts"] == "1", seconds=40)
    assert eventually(lambda: loaded("one"), seconds=90) == first
    manager.run("systemctl", "stop", UNIT)
    assert booted.containers() == before
    manager.run("systemctl", "start", UNIT)
    assert eventually(lambda: loaded("one"), seconds=90) == first
    assert booted.containers() == before  # each time they were taken over
    process = manager.main_pid(UNIT)
    assert f"process {process} keeps" in booted.kybernate("up", "-d")

    booted.kybernate("down")
    assert manager.show(UNIT)["LoadState"] == "not-found"
    assert booted.containers() == {}
    manager.run("test", "!", "-e", f"/etc/systemd/system/{UNIT}")


def test_service_has_no_variables_of_the_shell(booted: Booted) -> None:
    """So a file that needs some is refused, before there is a service that cannot start."""
    machine, manager = booted.machine, booted.manager
    machine.write(of_image("one").replace("user: 1000", "env: {GIVEN: '${SET_HERE}'}"))
    said = booted.kybernate("up", "-d", status=2)
    assert "the variable SET_HERE is not set" in said
    assert "env_file" in said
    assert manager.show(UNIT)["LoadState"] == "not-found"
    (machine.directory / "own.env").write_text("SET_HERE=yes\n")
    machine.write(of_image("one").replace("user: 1000", "env: {GIVEN: '${SET_HERE}'}"), extra="env_file: own.env")
    booted.kybernate("up", "-d")
    eventually(lambda: loaded("one"), seconds=90)
    booted.kybernate("down")
