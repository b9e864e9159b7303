"""A fake agent on a socket of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.agent import FakeAgent


@pytest.fixture
def fake() -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))  # pytest's own directories are too deep for a socket's address
    agent = FakeAgent(directory / "agent.sock")
    yield agent
    agent.stop()
    shutil.rmtree(directory)
