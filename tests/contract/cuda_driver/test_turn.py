"""A program of a container whose seat has not its turn waits before its first call of the driver, and asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kybernate.agent.seats import turn_files
from kybernate.agent.seats.turn_files import TurnFiles
from kybernate_shim.oci.preload_spec import make_turn_file
from kybernate_shim.run_directory import turn_file
from tests.fakes.cuda import Gpus
from tests.system.ctr import eventually

pytestmark = pytest.mark.root
KEY = ("k8s.io", "one")
NOT_READY = 802
BEGINS = """
import ctypes, os, sys
print("up", flush=True)
library = ctypes.CDLL("libcuda.so.1")
for _ in range(2):
    print(library.cuInit(0), flush=True)
"""
FORKED = "import os\nif os.fork():\n    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
THROUGH_DRIVER = """
pointer, init = ctypes.c_void_p(), ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)
library.cuGetProcAddress(b"cuInit", ctypes.byref(pointer), 12000, ctypes.c_uint64(0))
print(init(pointer.value)(0), flush=True)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_turn_file(turn_file(*KEY, tmp_path / "sources" / "turns"))


@pytest.fixture
def turns(tmp_path: Path, file: Path) -> Iterator[TurnFiles]:
    """The agent's side."""
    found = TurnFiles(tmp_path / "sources" / "turns")
    yield found
    found.close()


@pytest.fixture
def begin(gpus: Gpus, libraries: Path, preload: Path, file: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(program: str = BEGINS) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **gpus.environment(libraries),
            "LD_PRELOAD": str(preload),
            "KYBERNATE_TURN": str(file),
        }
        started.append(
            subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answers(process: subprocess.Popen[str]) -> list[str]:
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, process.returncode
    return text.split()


def waits_before_the_driver(process: subprocess.Popen[str], turns: TurnFiles, gpus: Gpus) -> bool:
    """Return whether it has asked for its turn; it must not have begun."""
    assert process.poll() is None, "it has not waited"
    assert gpus.held() == {}, "it has begun"
    return turns.is_awaited(KEY)


def test_program_begins_in_its_turn(begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles) -> None:
    turns.show({KEY: True})
    assert answers(begin()) == ["up", "0", "0"]
    assert not turns.is_awaited(KEY)


def test_program_waits_for_its_turn_and_asks_for_it(
    begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, gpus: Gpus
) -> None:
    turns.show({KEY: False})
    process = begin()
    assert eventually(lambda: waits_before_the_driver(process, turns, gpus))
    turns.show({KEY: True})
    assert answers(process) == ["up", "0", "0"]


@pytest.mark.parametrize("program", ["forked", "through_driver"])
def test_each_way_to_begin_waits(begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, program: str) -> None:
    text = BEGINS.replace("print(", FORKED + "print(", 1) if program == "forked" else BEGINS.split("for ")[0]
    turns.show({KEY: False})
    process = begin(text if program == "forked" else text + THROUGH_DRIVER)
    assert eventually(lambda: turns.is_awaited(KEY))
    assert process.poll() is None
    turns.show({KEY: True})
    assert answers(process)[1] == "0"


def test_agent_that_starts_again_is_asked_again(
    begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, gpus: Gpus, tmp_path: Path
) -> None:
    turns.show({KEY: False})
    process = begin()
    assert eventually(lambda: turns.is_awaited(KEY))
    turns.close()
    later = TurnFiles(tmp_path / "sources" / "turns")
    later.show({KEY: False})
    assert eventually(lambda: waits_before_the_driver(process, later, gpus))
    later.show({KEY: True})
    assert answers(process) == ["up", "0", "0"]
    later.close()


def test_program_that_is_asked_to_sleep_asks_no_more(
    begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, gpus: Gpus
) -> None:
    turns.show({KEY: False})
    first = begin()
    assert eventually(lambda: turns.is_awaited(KEY))
    turns.settle(KEY)
    assert not turns.is_awaited(KEY)
    second = begin()
    assert eventually(lambda: waits_before_the_driver(second, turns, gpus)), "a later one asks"
    assert first.poll() is None


@pytest.mark.parametrize(("waits", "seconds", "code"), [(False, 110, 0), (True, 0, NOT_READY)])
def test_program_does_without_an_agent_as_the_node_says(
    begin: Callable[..., subprocess.Popen[str]],
    turns: TurnFiles,
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
    seconds: int,
    code: int,
) -> None:
    monkeypatch.setattr(turn_files, "WAIT_SECONDS", seconds)
    turns.waits = waits
    turns.show({KEY: False})
    process = begin()
    assert eventually(lambda: turns.is_awaited(KEY))
    assert process.poll() is None
    turns.close()
    assert answers(process)[1] == str(code)


def test_program_waits_for_an_agent_that_is_away(
    begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, gpus: Gpus, tmp_path: Path
) -> None:
    turns.show({KEY: False})
    turns.close()
    process = begin()
    later = TurnFiles(tmp_path / "sources" / "turns")
    assert eventually(lambda: later.show({KEY: False}) or waits_before_the_driver(process, later, gpus))
    later.show({KEY: True})
    assert answers(process)[1] == "0"
    later.close()


def test_node_without_seats_lets_programs_of_former_seats_begin(
    begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, tmp_path: Path
) -> None:
    turns.show({KEY: False})
    process = begin()
    assert eventually(lambda: turns.is_awaited(KEY))
    turns.close()
    TurnFiles(tmp_path / "sources" / "turns").show({})
    assert answers(process) == ["up", "0", "0"]


def test_container_of_the_same_name_has_a_file_of_its_own(
    begin: Callable[..., subprocess.Popen[str]], turns: TurnFiles, file: Path
) -> None:
    turns.show({KEY: False})
    file.unlink()
    make_turn_file(file)
    turns.show({KEY: False})
    begin()
    assert eventually(lambda: turns.is_awaited(KEY))
