"""Which parts of an image have arrived: so that a transfer that was interrupted continues, and reads nothing twice.

A file next to those that arrive: one line that says of which image, then a record for each part. It is believed only
within the boot in which it was written: after a power failure, what it says need not be on the disk. A record that was
written half, by a process that was killed, has a wrong sum, and ends the file.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from threading import Lock

from kybernate.store.ranges import Ranges
from kybernate_shim.linux.private_files import FILE_MODE
from kybernate_shim.linux.process import boot_id

NAME = ".kybernate-arrived"
VERSION = 1
RECORD = struct.Struct("<IQQ32sB")  # number of the file, offset, bytes, digest of them, its length
SUM = struct.Struct("<I")

Part = tuple[str, int, int]  # file, offset, bytes


class Arrived:
    """The record of one directory that an image arrives in. Any thread may add to it."""

    def __init__(self, directory: Path, manifest: bytes, files: tuple[str, ...]) -> None:
        """Continue the record that is there, or begin one. Raises OSError."""
        self._numbers = {name: number for number, name in enumerate(files)}
        self._parts: dict[Part, bytes] = {}
        self._ranges = Ranges()
        self._lock = Lock()
        head = json.dumps({"version": VERSION, "boot": boot_id(), "manifest": sha256(manifest).hexdigest()}) + "\n"
        self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        with os.fdopen(os.dup(self._file), "rb") as stream:
            self.continues = stream.readline() == head.encode()
            good = stream.tell()
            for part, digest in _records(stream.read(), files) if self.continues else ():
                self._note(part, digest)
                good += RECORD.size + SUM.size
        os.ftruncate(self._file, good if self.continues else 0)
        os.lseek(self._file, 0, os.SEEK_END)
        if not self.continues:
            os.write(self._file, head.encode())

    def has(self, file: str, offset: int, size: int) -> bool:
        """Return whether these bytes are there, in whichever parts they came."""
        with self._lock:
            return self._ranges.has(file, offset, size)

    def digest(self, file: str, offset: int, size: int) -> bytes:
        """Return the digest that this part was added with, b"" where it had none, or came in other parts."""
        return self._parts.get((file, offset, size), b"")

    def add(self, file: str, offset: int, size: int, digest: bytes = b"") -> None:
        """Note that a part was written. Raises OSError."""
        body = RECORD.pack(self._numbers[file], offset, size, digest, len(digest))
        with self._lock:
            os.write(self._file, body + SUM.pack(zlib.crc32(body)))
            self._note((file, offset, size), digest)

    def close(self) -> None:
        os.close(self._file)

    def _note(self, part: Part, digest: bytes) -> None:
        self._parts[part] = digest
        self._ranges.add(*part)


def _records(content: bytes, files: tuple[str, ...]) -> Iterator[tuple[Part, bytes]]:
    """Yield the records up to the first one that is not whole."""
    step = RECORD.size + SUM.size
    for begin in range(0, len(content) - step + 1, step):
        body, (checksum,) = content[begin : begin + RECORD.size], SUM.unpack_from(content, begin + RECORD.size)
        number, offset, size, digest, length = RECORD.unpack(body)
        if zlib.crc32(body) != checksum or number >= len(files):
            return
        yield (files[number], offset, size), digest[:length]
