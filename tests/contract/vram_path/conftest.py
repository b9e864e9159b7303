"""The program whose memory is moved, and the directory of its image."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.actor import Actor


@pytest.fixture
def program() -> Iterator[Actor]:
    with Actor() as one:
        yield one


@pytest.fixture(params=["on a disk", "in memory"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "on a disk":
        directory = tmp_path / "image"
        directory.mkdir()
        yield directory
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as shm:
        yield Path(shm)
