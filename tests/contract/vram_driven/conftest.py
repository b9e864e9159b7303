"""The program whose driver writes the image, and the directory of the image."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.actor import Actor


@pytest.fixture
def program() -> Iterator[Actor]:
    with Actor() as one:
        yield one


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """A directory in 64 MiB of memory."""
    directory = tmp_path / "image"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # the program may have a file of it mapped
