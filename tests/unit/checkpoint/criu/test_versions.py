"""Versions of programs: asked once, and again as soon as the program is another one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.criu.versions import criu_of, runtime_of
from kybernate_shim.errors import Refused
from kybernate_shim.linux.children import Finished


@dataclass
class Programs:
    """Answers as the programs would; `asked` is what was run."""

    stdout: str
    asked: list[str] = field(default_factory=list)

    async def run(self, argv: Sequence[str], *, timeout: float | None = None) -> Finished:
        self.asked.append(argv[0])
        if not Path(argv[0]).exists():
            raise FileNotFoundError(f"{argv[0]}: not found")
        return Finished(tuple(argv), 0, self.stdout, "")


@pytest.fixture
def criu(tmp_path: Path) -> Path:
    path = tmp_path / "criu"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_version_is_asked_once_for_all_daemons(tmp_path: Path, criu: Path) -> None:
    first, second = Programs("Version: 4.1.1\n"), Programs("never asked")
    known = tmp_path / "run/versions"
    assert asyncio.run(criu_of(first, criu, known)).version == "4.1.1"
    assert asyncio.run(criu_of(second, criu, known)).version == "4.1.1"
    assert (first.asked, second.asked) == ([str(criu)], [])
    assert [path.name.startswith("criu.") for path in known.iterdir()] == [True]


def test_an_upgraded_program_is_asked_anew(tmp_path: Path, criu: Path) -> None:
    known = tmp_path / "versions"
    asyncio.run(criu_of(Programs("Version: 4.1.1\n"), criu, known))
    new = tmp_path / "new"
    new.write_text("#!/bin/sh\n")
    new.chmod(0o755)
    new.replace(criu)
    assert asyncio.run(criu_of(Programs("Version: 4.2\n"), criu, known)).version == "4.2"


def test_an_old_criu_is_refused_by_its_version(tmp_path: Path, criu: Path) -> None:
    for _ in range(2):  # asked, then known
        with pytest.raises(Refused, match=r"version 4\.0, at least 4\.1"):
            asyncio.run(criu_of(Programs("Version: 4.0\n"), criu, tmp_path / "versions"))


def test_a_missing_criu_is_named_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Refused, match="absent/criu cannot be run"):
            asyncio.run(criu_of(Programs(""), tmp_path / "absent/criu", tmp_path / "versions"))


def test_a_version_that_cannot_be_kept_is_still_told(tmp_path: Path, criu: Path) -> None:
    (tmp_path / "file").write_text("")
    programs = Programs("Version: 4.2\n")
    for _ in range(2):
        assert asyncio.run(criu_of(programs, criu, tmp_path / "file/versions")).version == "4.2"
    assert len(programs.asked) == 2


@pytest.mark.parametrize(
    ("said", "version"),
    [("runc version 1.3.0\ncommit: x\n", "1.3.0"), ("crun version v1.21\n", "1.21"), ("a runtime of few words", "")],
)
def test_a_runtime_says_its_version_in_its_own_way(tmp_path: Path, criu: Path, said: str, version: str) -> None:
    runtime = criu.rename(tmp_path / "runc")
    for _ in range(2):
        assert asyncio.run(runtime_of(Programs(said), runtime, tmp_path / "versions")).version == version
