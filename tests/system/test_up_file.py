"""What is asked of a `kybernate up` that runs, and what it does when its file changes. One runs for all of these."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from kybernate.up import control
from kybernate_shim.config import Config
from tests.system import node_agent, up_machine
from tests.system.checkpoints import PYTHON
from tests.system.ctr import eventually
from tests.system.up_machine import PROJECT, Machine, ask, in_pod, loaded, of_host, of_image, ready


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine whose `up` follows its file, with the model "one"."""
    with (
        node_agent.short_place() as place,
        node_agent.running(place) as agent,
        up_machine.machine(tmp_path_factory.mktemp("up"), agent) as machine,
    ):
        machine.write(of_image("one"))
        machine.up("--watch")
        ready(machine, "one")
        yield machine


@pytest.fixture
def machine(running: Machine) -> Iterator[Machine]:
    """That machine, with the same one model before and after a test."""
    yield running
    running.write(of_image("one"))
    eventually(lambda: set(running.pods()) == {"one"}, seconds=60)


def test_only_what_changed_in_the_file_is_touched(machine: Machine) -> None:
    machine.write(of_image("one"), of_image("two"))
    before, containers = ready(machine, "one", "two"), machine.pods()
    machine.write(of_image("one"), of_image("two").replace("user: 1000", "user: 1001"), of_host("three"))
    assert "reads the file again" in machine.kybernate("up", "models.yaml")
    eventually(lambda: loaded("three"), seconds=90)
    eventually(lambda: loaded("two") not in ("", before["two"]), seconds=90)
    assert loaded("one") == before["one"]
    assert machine.pods()["one"].container == containers["one"].container
    machine.write(of_image("one"))
    machine.kybernate("up", "models.yaml")
    eventually(lambda: set(machine.pods()) == {"one"}, seconds=60)
    assert loaded("one") == before["one"]


def test_file_is_followed(machine: Machine) -> None:
    """A change is done without a command; a mistake is said, and changes nothing."""
    before, said = ready(machine, "one"), machine.log().count("models.two.imag is unknown")
    machine.write(of_image("one"), "  two: {imag: x}")
    eventually(lambda: machine.log().count("models.two.imag is unknown") > said)
    assert loaded("one") == before["one"]
    machine.write(of_image("one"), of_host("follows"))
    ready(machine, "follows")
    assert loaded("one") == before["one"]


def test_broken_file_changes_nothing(machine: Machine) -> None:
    before, mark = ready(machine, "one"), "the file is not used as it is now"
    said = machine.log().count(mark)
    machine.write(of_image("one"), "  two: {imag: x}")
    eventually(lambda: machine.log().count(mark) == said + 1)  # it is followed
    assert "models.two.imag is unknown" in machine.kybernate("up", "models.yaml", status=2)
    os.kill(control.running_process(PROJECT), signal.SIGHUP)
    eventually(lambda: machine.log().count(mark) == said + 2)
    assert loaded("one") == before["one"]


def test_model_on_disk_comes_back_and_is_restarted(machine: Machine) -> None:
    machine.write(of_image("one"), of_image("disk"))
    before = ready(machine, "disk")
    process = ask("disk")["pid"]
    assert "disk is on disk" in machine.kybernate("sleep", "disk", "--disk")
    assert set(machine.pods()) == {"one"}
    states = {
        one["model"]: one["state"] for one in json.loads(machine.kybernate("models", "models.yaml", "-o", "json"))
    }
    assert states["disk"] == "on disk"
    assert loaded("disk") == before["disk"]
    assert "disk is ready" in machine.kybernate("restart", "disk", "--file", "models.yaml")
    assert loaded("disk") == before["disk"]
    assert ask("disk")["pid"] == process  # as a restore has it
    machine.kybernate("restart", "disk", "--fresh", "--file", "models.yaml")
    eventually(lambda: loaded("disk") not in ("", before["disk"]), seconds=60)
    assert "no model is called none" in machine.kybernate("restart", "none", "--file", "models.yaml", status=3)
    assert "disk: " in machine.kybernate("up", "models.yaml", "--pull")


def test_template_that_does_not_restore_is_replaced(machine: Machine) -> None:
    """As after a change of the driver: the program starts from the beginning, which one line says."""
    machine.write(of_image("one"), of_image("torn"))
    before, zero = ready(machine, "torn"), machine.log().count("starts from zero")
    (place,) = (Config().checkpoint_root / PROJECT).glob("torn-*")
    for file in place.glob("pages-*.img"):
        file.write_bytes(b"damaged")
    ask("torn", "end yourself")
    eventually(lambda: loaded("torn") not in ("", before["torn"]), seconds=90)
    assert machine.log().count("starts from zero") == zero + 1
    eventually(lambda: machine.log().count("torn: saving") == 2, seconds=60)
    eventually(lambda: machine.log().count("torn: ready at") == 2, seconds=60)
    second = loaded("torn")
    ask("torn", "end yourself")
    assert eventually(lambda: loaded("torn"), seconds=90) == second


def test_models_have_networks_of_their_own(machine: Machine) -> None:
    """By the node's CNI configuration: each comes back under another address, and is found there."""
    machine.write(of_image("one"), in_pod("apart"))
    before = ready(machine, "one", "apart")
    first = machine.pods()["apart"].address
    assert first != machine.pods()["one"].address == "127.0.0.1"
    ask("apart", "end yourself")
    eventually(lambda: loaded("apart"), seconds=90)
    assert loaded("apart") == before["apart"]
    assert machine.pods()["apart"].address != "127.0.0.1"


def test_program_that_cannot_start_is_said_and_does_not_block_the_others(machine: Machine) -> None:
    broken = f"  bad: {{image: '{PYTHON}', command: [python3, -c, 'raise SystemExit(3)'], priority: 5}}"
    absent = "  absent: {image: 'localhost:5000/no-such-image:1', priority: 6}"
    machine.write(of_image("one"), broken, absent, of_image("good"))
    assert ready(machine, "good")
    eventually(lambda: "bad: its program has ended with status 3" in machine.log(), seconds=60)
    eventually(lambda: "bad: backing off" in machine.log())
    eventually(lambda: "absent: pulling failed" in machine.log(), seconds=60)


def test_logs_are_those_of_the_program(machine: Machine) -> None:
    before = ready(machine, "one")
    assert f"loaded {before['one']}" in machine.kybernate("logs", "one", "--file", "models.yaml")
    assert "has no model none" in machine.kybernate("logs", "none", "--file", "models.yaml", status=3)


def test_one_process_keeps_a_project(machine: Machine) -> None:
    first = control.running_process(PROJECT)
    assert f"process {first} keeps" in machine.kybernate("up", "models.yaml", "-d")
    assert control.running_process(PROJECT) == first
