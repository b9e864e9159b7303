"""Reads the VRAM of an image on a disk ahead, while its container is still created: the disk would have nothing to do.

The restore reads the same files through the page cache, and finds there what has come by then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.vram_io.errors import VramError

STEP: Final = 8 << 20  # bytes that are asked for before the end of the block is noticed


def files_ahead(image: Image) -> tuple[Path, ...]:
    """Return the files that a restore maps. Those that arrive, or are decrypted or copied by it, are read otherwise."""
    if image.arriving or image.manifest.encryption is not None:
        return ()
    return tuple(image.path / one.file for one in image.manifest.vram)


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Have what is on a disk read into the page cache while the block lasts. What fails here shows in the restore."""
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(files, stop), name="read-ahead", daemon=True)
    if files:
        thread.start()
    try:
        yield
    finally:
        stop.set()  # a read that waits for the disk ends by itself


def _read(files: Sequence[Path], stop: threading.Event) -> None:
    from kybernate_shim.vram_io.files import is_in_memory, is_mappable  # few commands restore

    for path in files:
        try:
            if is_mappable(path) and not is_in_memory(path):
                _read_file(path, stop)
        except (OSError, VramError):
            return


def _read_file(path: Path, stop: threading.Event) -> None:
    descriptor = open_plain(path)
    try:
        for offset in range(0, os.fstat(descriptor).st_size, STEP):
            if stop.is_set():
                return
            os.posix_fadvise(descriptor, offset, STEP, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
