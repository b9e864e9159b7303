"""A program in sealed memory: what is executed is the file's content, as long as the file is the same."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux import sealed_program
from kybernate_shim.linux.children import Children
from kybernate_shim.linux.sealed_program import NUMBER, SEALS, executable, forget, seal

SLEEP = Path(shutil.which("sleep") or "sleep").resolve()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program of our own, that is executed from memory."""
    monkeypatch.setattr(sealed_program, "DIRECTORY", tmp_path / "links")
    path = tmp_path / "napper"
    shutil.copy(SLEEP, path)
    seal(path)
    yield path
    forget()


def run(program: Path) -> tuple[str, str]:
    """Run it for a moment, and return what it was executed from and what it is called."""

    async def work() -> tuple[str, str]:
        children = Children()
        children.attach(asyncio.get_running_loop())
        child = children.spawn([str(program), "1000"])
        process = Path(f"/proc/{child.pid}")
        found = str((process / "exe").readlink()), (process / "comm").read_text()
        assert not (process / "fd" / str(NUMBER)).exists()
        await child.end()
        await child.exited
        return found

    return asyncio.run(work())


def test_program_is_executed_from_memory_by_its_name(program: Path) -> None:
    assert run(program) == ("/memfd:napper (deleted)", "napper\n")


def test_memory_cannot_be_written_to(program: Path) -> None:
    assert fcntl.fcntl(NUMBER, fcntl.F_GET_SEALS) == SEALS
    with pytest.raises(PermissionError), Path(f"/proc/self/fd/{NUMBER}").open("r+b") as file:
        file.write(b"evil")


def test_file_that_was_replaced_is_executed_itself(program: Path) -> None:
    shutil.copy(SLEEP, program.with_name("new"))
    program.with_name("new").replace(program)
    assert executable(str(program)) == str(program)
    assert run(program) == (str(program), "napper\n")


def test_other_program_is_executed_from_its_file(program: Path) -> None:
    assert run(SLEEP)[0] == str(SLEEP)


def test_file_is_executed_where_memory_must_not_be(program: Path) -> None:
    """As where a process has removed the link; a security module may refuse, too."""
    (sealed_program.DIRECTORY / program.name).unlink()
    assert run(program)[0] == str(program)
    assert sealed_program.descriptors() == ()


def test_script_is_not_sealed(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(OSError, match="script"):
        seal(script)
    assert executable(str(script)) == str(script)
