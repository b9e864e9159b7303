"""What `start` answers: the newest version of the protocol that the containerd that calls accepts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kybernate_shim.bootstrap import EVERY, GROUPED, accepted_by, answer, protocol_of, release_in

NO_PROCESS = 1 << 30


@pytest.mark.parametrize(
    ("words", "release", "version"),
    [
        ("containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+b4", "1.7.24~ds1", EVERY),
        ("containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da", "1.7.27", EVERY),
        ("containerd github.com/containerd/containerd/v2 2.0.0 207ad711eabd", "2.0.0", GROUPED),
        ("containerd github.com/k3s-io/containerd v2.1.4-k3s1 1.33", "2.1.4-k3s1", GROUPED),
        ("containerd github.com/containerd/containerd/v2 2.4.0-beta.0+unknown", "2.4.0-beta.0+unknown", GROUPED),
        ("containerd github.com/containerd/containerd/v2 10.0 x", "10.0", GROUPED),
        ("k3s version v1.33.5+k3s1 (abc)\ngo version go1.24", "", EVERY),
        ("containerd", "", EVERY),
        ("", "", EVERY),
        ("containerd x unknown y", "unknown", EVERY),
    ],
)
def test_release_says_which_version_is_accepted(words: str, release: str, version: int) -> None:
    assert release_in(words) == release
    assert accepted_by(release) == version


def test_answer_has_what_containerd_reads() -> None:
    assert json.loads(answer(Path("/run/containerd/s/x"), GROUPED)) == {
        "version": 3,
        "address": "unix:///run/containerd/s/x",
        "protocol": "ttrpc",
    }


@pytest.fixture
def containerd(tmp_path: Path) -> Path:
    """A program that notes each time that it is asked."""
    path = tmp_path / "bin"
    says(path, "2.1.5")
    return path


def says(path: Path, release: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(f"#!/bin/sh\necho x >> {path.parent}/asked\necho containerd {path} {release} rev\n")
    new.chmod(0o755)
    new.replace(path)


def times(containerd: Path) -> int:
    return len((containerd.parent / "asked").read_text().split())


def test_program_is_asked_once_until_it_is_replaced(containerd: Path, tmp_path: Path) -> None:
    known = tmp_path / "run/versions"
    for _ in range(3):
        assert protocol_of(NO_PROCESS, str(containerd), known) == GROUPED
    assert times(containerd) == 1
    says(containerd, "1.7.24")
    assert protocol_of(NO_PROCESS, str(containerd), known) == EVERY
    assert times(containerd) == 2


def test_program_that_runs_counts_not_the_file_that_has_taken_its_place(containerd: Path, tmp_path: Path) -> None:
    """An upgrade replaces the file some time before the restart."""
    own = Path("/proc/self/exe").readlink()
    assert protocol_of(os.getpid(), str(own), tmp_path / "versions") == EVERY  # an interpreter, which is no containerd
    (record,) = (tmp_path / "versions").iterdir()
    assert f"{own.stat().st_ino:x}" in record.name.split(".")
    assert protocol_of(os.getpid(), str(containerd), tmp_path / "versions") == GROUPED  # behind a wrapper


@pytest.mark.parametrize("script", ["exit 3", None], ids=["fails", "is no program"])
def test_program_that_does_not_say_gets_what_every_containerd_accepts(
    containerd: Path, tmp_path: Path, script: str | None
) -> None:
    containerd.write_text(f"#!/bin/sh\n{script}\n" if script else "")
    for _ in range(2):
        assert protocol_of(NO_PROCESS, str(containerd), tmp_path / "versions") == EVERY
    assert not (tmp_path / "versions").exists()


def test_missing_program_gets_what_every_containerd_accepts(tmp_path: Path) -> None:
    for binary in ("", "containerd", "/none/containerd"):
        assert protocol_of(NO_PROCESS, binary, tmp_path / "versions") == EVERY


def test_version_that_cannot_be_kept_is_still_known(containerd: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert protocol_of(NO_PROCESS, str(containerd), tmp_path / "file/versions") == GROUPED
    assert times(containerd) == 2
