"""A directory that an image arrives in: the restore may begin when CRIU's own files are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kybernate.store.sink import DirectorySink
from kybernate_shim.checkpoint.image.manifest import ARRIVING, STAGING
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.vram_io.arrival import ArrivalWriter, Description, begin


class ArrivingSink:
    """Writes the files of an image, all of which have their full size from the beginning, and keeps the record.

    `awaited` are the files that the restore waits for by itself. When all others are there, the manifest appears under
    the name under which a restore alone finds it, and `ready` is called. `digests` are for the record.
    """

    def __init__(
        self,
        directory: Path,
        sizes: Mapping[str, int],
        manifest: bytes,
        description: Description,
        ready: Callable[[], object],
        digests: Mapping[str, str],
    ) -> None:
        self._directory, self._manifest, self._ready = directory, manifest, ready
        self._files = DirectorySink(directory, sizes)
        self._awaited = description.files.keys()
        self._needed = sum(size for name, size in sizes.items() if name not in self._awaited)
        self._lock = threading.Lock()
        self._files.make()
        self.record: ArrivalWriter = begin(directory, description, digests)
        self._count("", 0)

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        view = memoryview(content)
        self._files.write(file, offset, view)
        self._arrived(file, offset, len(view), view)

    def zeros(self, file: str, offset: int, size: int) -> None:
        self._files.zeros(file, offset, size)
        self._arrived(file, offset, size)

    def keep(self, *, durable: bool) -> None:
        """Make what has arrived an image like any other."""
        self._files.finish(self._manifest, durable=durable)
        (self._directory / ARRIVING).unlink()

    def close(self) -> None:
        self._files.close()
        self.record.close()

    def _arrived(self, file: str, offset: int, size: int, content: memoryview | None = None) -> None:
        if file in self._awaited:
            self.record.wrote(file, offset, size, content)
        else:
            self._count(file, size)

    def _count(self, file: str, size: int) -> None:
        with self._lock:
            self._needed -= size
            complete = self._needed == 0 and (size > 0 or not file)
        if complete:
            replace_file(self._directory / ARRIVING, self._manifest, durable=False, staging=STAGING)
            self._ready()
