"""An image's directory as something that is brought back: files of full size, holes as holes, the manifest last."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.linux.atomic_write import replace_file, sync
from kybernate_shim.linux.private_files import FILE_MODE


class DirectorySink:
    """Writes into an existing directory of root's own. `finish` makes it an image; before that, it is none."""

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self._directory = directory
        self._sizes = sizes
        self._open: dict[str, int] = {}
        self._lock = Lock()

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        descriptor, view = self._descriptor(file), memoryview(content)
        while view:
            written = os.pwrite(descriptor, view, offset)
            offset, view = offset + written, view[written:]

    def zeros(self, file: str, offset: int, size: int) -> None:
        self._descriptor(file)  # the file has its full size, and what is not written is a hole

    def make(self) -> None:
        """Make all files, of full size and one hole each."""
        for name in self._sizes:
            self._descriptor(name)

    def finish(self, manifest: bytes, *, durable: bool) -> None:
        """Write the manifest, after all else is on the disk where it is to be durable."""
        for name in self._sizes:
            descriptor = self._descriptor(name)
            if durable:
                os.fsync(descriptor)
        if durable:
            sync(self._directory)
        replace_file(self._directory / NAME, manifest, durable=durable, staging=f".{NAME}.tmp")

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(self._directory / file, flags, FILE_MODE)
                self._open[file] = descriptor
                os.ftruncate(descriptor, self._sizes[file])
            return self._open[file]
