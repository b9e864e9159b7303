"""The command line that tests run without starting an interpreter: it is that of the program, to the last byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import warm

PROGRAM = Path(sys.executable).parent / "kybernate"


@pytest.mark.parametrize("words", [["--version"], ["checkpoint", "--nonsense"], ["inspect", "none/there"]])
def test_output_and_status_are_the_programs(words: list[str]) -> None:
    program = subprocess.run([PROGRAM, *words], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    done = warm.run(["kybernate", *words])
    assert (done.returncode, done.stdout, done.stderr) == (program.returncode, program.stdout, program.stderr)


def test_directory_and_environment_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image").write_text("no directory")
    monkeypatch.setenv("KYBERNATE_TRACE", "1")
    said = warm.run(["kybernate", "inspect", "./image"]).stderr.decode()
    assert str(tmp_path) in said or "./image" in said
    assert "Traceback" in said


def test_command_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(["kybernate", "--version"], timeout=0)


def test_first_command_of_a_name_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_begun", set())
    assert [warm.can_run(["kybernate", name]) for name in ("ps", "ps", "top", "ps")] == [False, True, False, True]
    assert not warm.can_run(["ctr", "ps"])
    assert not warm.can_run(["kybernate"])
