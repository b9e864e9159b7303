"""Lets one restore at a time look at a GPU's free memory and then use it: two that look first would both find room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kybernate_shim.linux.locks import held, try_lock_file
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN

DIRECTORY = RUN / "claims"
POLL_SECONDS = 0.02


@asynccontextmanager
async def claimed(gpus: Iterable[str], directory: Path = DIRECTORY) -> AsyncIterator[None]:
    """Hold the GPUs, by UUID, against other restores on this node; waits for those that are at it.

    A claim ends with its process, too.
    """
    make_directory(directory)
    async with AsyncExitStack() as stack:
        for uuid in sorted(gpus):  # in one order everywhere, so that two never wait for each other
            while (lock := try_lock_file(directory / uuid)) is None:  # noqa: ASYNC110  # flock(2) sends no notification
                await asyncio.sleep(POLL_SECONDS)
            stack.enter_context(held(lock))
        yield
