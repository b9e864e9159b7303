"""Images for restores that fail, and what such a restore must leave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.system.checkpoints import (
    PROMPTLY,
    counting,
    refused,
    save,
)
from tests.system.ctr import Ctr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where an image shall be; nothing is there yet."""
    return tmp_path / "image"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of a counting container."""
    path = tmp_path_factory.mktemp("good") / "image"
    with counting(Ctr()) as witness:
        save(Ctr(), witness.id, path)
    return path


def restore_refused(ctr: Ctr, image: Path, *flags: str) -> str:
    """Try to restore by the annotation, and return the error; the container can be deleted without delay."""
    id = ctr.new_id("r")
    annotation = ["--annotation", f"kybernate.io/restore-from={image}"]
    said = refused(*ctr.run_argv(id, "sleep", "1000", flags=["-d", *annotation, *flags]))
    begin = time.monotonic()
    ctr.remove(id)
    assert time.monotonic() - begin < PROMPTLY
    return said
