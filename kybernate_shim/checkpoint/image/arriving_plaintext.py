"""The files with VRAM of an encrypted image that still arrive: decrypted in memory, part by part, as they come.

The plain files arrive as well, for the restore: their directory has a record of its own, which this process writes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kybernate_shim.checkpoint.image.encrypted import open_encrypted, threads
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.trust.encryption import SUFFIX, TAG_BYTES, Buffers, EncryptedFile, Layout, write_all
from kybernate_shim.vram_io.arrival import Arrival, ArrivalWriter, begin
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.files import punch


@contextmanager
def decrypting(arrival: Arrival, source: Path, target: Path, manifest: Manifest, data_key: bytes) -> Iterator[None]:
    """Decrypt the files with VRAM into the directory `target` while the block lasts. Raises OSError."""
    sizes = {file.file: file.size for file in manifest.moved_files}
    for name, size in sizes.items():
        with (target / name).open("xb") as file:
            file.truncate(size)
    writer = begin(target, replace(arrival.description, files=sizes, transient=True))
    work = _Decryption(arrival, source, target, manifest, data_key, writer)
    thread = threading.Thread(target=work.run, args=(sizes,), name="decryption")
    thread.start()
    try:
        yield
    finally:
        work.stop.set()
        thread.join()
        writer.close()


class _Decryption:
    """What the threads of one image share."""

    def __init__(
        self, arrival: Arrival, source: Path, target: Path, manifest: Manifest, data_key: bytes, writer: ArrivalWriter
    ) -> None:
        self.stop = threading.Event()
        self._arrival, self._source, self._target = arrival, source, target
        self._manifest, self._data_key, self._writer = manifest, data_key, writer
        self._own = threading.local()

    def run(self, sizes: dict[str, int]) -> None:
        try:
            with ThreadPoolExecutor(threads(), "decryption") as pool:
                for name, size in sizes.items():
                    self._file(name, size, pool)
            self._writer.complete()
        except (VramError, Damaged, OSError) as error:
            self._writer.fail(str(error))

    def _file(self, name: str, size: int, pool: ThreadPoolExecutor) -> None:
        assert self._manifest.encryption is not None
        body = Layout(size, self._manifest.encryption.chunk_bytes, ()).body
        self._arrival.wait(f"{name}{SUFFIX}", 0, body, self.stop.is_set)
        spent = open_plain(self._source / f"{name}{SUFFIX}", flags=os.O_RDWR)
        plain = open_plain(self._target / name, flags=os.O_RDWR)
        try:
            with open_encrypted(self._source, name, size, self._manifest.id, self._data_key) as file:
                list(pool.map(lambda chunk: self._chunk(file, name, chunk, spent, plain), range(file.layout.count)))
        finally:
            os.close(spent)
            os.close(plain)

    def _chunk(self, file: EncryptedFile, name: str, chunk: int, spent: int, plain: int) -> None:
        layout = file.layout
        offset, size = layout.offset(chunk), layout.length(chunk)
        if self.stop.is_set():
            raise VramError(f"{name} was not decrypted to its end")
        if offset is not None:
            self._arrival.wait(f"{name}{SUFFIX}", offset, size + TAG_BYTES, self.stop.is_set)
            write_all(plain, file.decrypt(chunk, self._buffers(layout.chunk_bytes)), chunk * layout.chunk_bytes)
            if self._arrival.description.transient:
                punch(spent, offset, size + TAG_BYTES)
        self._writer.wrote(name, chunk * layout.chunk_bytes, size)

    def _buffers(self, chunk_bytes: int) -> Buffers:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = Buffers(chunk_bytes)
        found: Buffers = self._own.buffers
        return found
