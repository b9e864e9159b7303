"""Lets one restore at a time look at a GPU's free memory and then use it: two that look first would both find room."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kybernate_shim.linux.private import create_private, make_directory

DIRECTORY = Path("/run/kybernate/claims")
POLL_SECONDS = 0.02


@asynccontextmanager
async def claimed(gpus: Iterable[str], directory: Path = DIRECTORY) -> AsyncIterator[None]:
    """Hold the GPUs, by UUID, against other restores on this node; waits for those that are at it.

    A claim ends with its process, too.
    """
    make_directory(directory)
    async with AsyncExitStack() as stack:
        for uuid in sorted(gpus):  # in one order everywhere, so that two never wait for each other
            file = stack.enter_context(create_private(directory / uuid))
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(POLL_SECONDS)
        yield
