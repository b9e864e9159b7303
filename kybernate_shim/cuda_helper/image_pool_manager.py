"""The pool of memory for images, kept full by the node's CUDA helper while that has nothing else to do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kybernate_shim.vram_io import image_pool

MODULE = "kybernate_shim.vram_io.image_pool_filling"
RETRY_SECONDS = 60.0


class ImagePoolManager:
    """Fills a pool with files, in a separate process."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._filling: asyncio.Task[None] | None = None
        self._next = 0.0
        self._tried: tuple[Path, Sequence[int]] | None = None
        self._said = ""

    def tidy(self, now: float, directory: Path | None, sizes: Sequence[int]) -> None:
        """Begin to make what is missing in `directory` of files of `sizes`; None for no pool.

        It does nothing while a filling runs, or for a moment after one has failed for the same pool.
        """
        if directory is None or (self._filling is not None and not self._filling.done()):
            return
        if now < self._next and (directory, sizes) == self._tried:
            return
        if missing := image_pool.lacking(directory, sizes):
            self._next, self._tried = now + RETRY_SECONDS, (directory, sizes)
            self._filling = asyncio.ensure_future(self._fill(directory, sizes, sum(missing)))

    async def close(self) -> None:
        """End a filling; the files that are ready stay."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])

    async def _fill(self, directory: Path, sizes: Sequence[int], size: int) -> None:
        began = asyncio.get_running_loop().time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, str(directory), *map(str, sizes)),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, words = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            self._tell_once(words.decode(errors="replace").strip())
        else:
            took = asyncio.get_running_loop().time() - began
            self._next, self._said = 0.0, ""
            self._log.info("image_pool.filled", bytes=size, seconds=round(took, 3))

    def _tell_once(self, words: str) -> None:
        if words != self._said:
            self._said = words
            self._log.warning("image_pool.not_filled", error=words)
