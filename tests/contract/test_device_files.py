"""What a process holds of NVIDIA's devices is found whatever else it has open, by the kernel's own word."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kybernate_shim.linux.nvidia_devices import look
from tests.fakes.silent_filesystem import NAME, SIZE, SilentFilesystem, silent_filesystem

pytestmark = pytest.mark.root
ZERO = frozenset({(stat.S_IFCHR, 1)})  # stands for NVIDIA's: /dev/zero
SECONDS = 5.0


@pytest.fixture
def filesystem(tmp_path: Path) -> Iterator[SilentFilesystem]:
    with silent_filesystem(tmp_path) as one:
        yield one


def test_file_of_a_server_that_does_not_answer_is_not_waited_for(filesystem: SilentFilesystem, tmp_path: Path) -> None:
    with (
        (tmp_path / NAME).open("rb") as file,
        mmap.mmap(file.fileno(), SIZE, mmap.MAP_SHARED, mmap.PROT_READ),
        Path("/dev/zero").open("rb") as zero,
        ThreadPoolExecutor(1) as apart,
    ):
        filesystem.speaking.clear()
        looking = apart.submit(look, os.getpid(), ZERO)
        try:
            assert looking.result(SECONDS).descriptors >= {zero.fileno()}
        finally:
            filesystem.speaking.set()
