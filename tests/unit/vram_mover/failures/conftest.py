"""A process whose memory is moved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kybernate_shim.linux.process_memory import Region
from tests.fakes.memory_process import MemoryProcess
from tests.unit.vram_mover.failures.faulty import SIZE


@pytest.fixture
def process() -> Iterator[MemoryProcess]:
    with MemoryProcess() as running:
        yield running


@pytest.fixture
def region(process: MemoryProcess) -> Region:
    found = process.region("a", SIZE)
    process.fill("a", 0, SIZE)
    return found
