"""Copies an image from directory to directory: parts of files in threads, each digested on its way.

The bytes are compared with the signed manifest while they pass, so a copy costs one read and one write, and a copy of
damaged files never becomes an image. Parts that had arrived before keep their digests in the record of arrivals.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from kybernate.store.errors import ImageDamaged
from kybernate.store.in_thread import in_thread
from kybernate.store.tiers.arrived import Arrived
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.digest_form import DigestForm, form_of
from kybernate_shim.checkpoint.image.manifest import File, Manifest
from kybernate_shim.linux.plain_files import READ, open_plain
from kybernate_shim.vram_io.files import punch

BUFFER = 8 << 20  # bytes of one read or write; larger ones are no faster on NVMe
BLOCK = 4096  # that direct I/O is aligned to
TASK_BYTES = 64 << 20  # that one call of a thread copies, about
LEAST_DIRECT = 1 << 20  # smaller files are not worth two descriptors


@dataclass(frozen=True)
class _File:
    """A file of an image as it is stored. `form` says how its digest is made; None where it is encrypted."""

    name: str
    size: int
    digest: str
    form: DigestForm | None

    def parts(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the pieces of its digest."""
        form = self.form or DigestForm("")
        return [(start, min(form.piece_bytes, self.size - start)) for start in form.pieces(self.size)]


async def copy(source: Path, target: Path, manifest: Manifest, arrived: Arrived, transfer: Transfer) -> None:
    """Copy what has not arrived into files that exist in their full size.

    Raises ImageDamaged and OSError; the copy can be continued then.
    """
    files = [_file(file, stored) for file, stored in zip(manifest.files, manifest.stored_files, strict=True)]
    transfer.begins(sum(file.size for file in files))
    async with asyncio.TaskGroup() as group:
        slots = asyncio.Semaphore(transfer.parallel)
        for file in files:
            for parts in _tasks(file, arrived, transfer):
                await slots.acquire()
                await transfer.pace(sum(size for _, size in parts))
                work = in_thread(_copy_parts, source / file.name, target / file.name, file, parts, arrived)
                task = group.create_task(_counted(work, parts, transfer))
                task.add_done_callback(lambda _: slots.release())
    for file in files:
        os.truncate(target / file.name, file.size)  # direct I/O has written whole blocks
        _require_same(file, arrived)


async def _counted(work: Awaitable[None], parts: list[tuple[int, int]], transfer: Transfer) -> None:
    await work
    size = sum(size for _, size in parts)
    transfer.done(done_bytes=size, sent_bytes=size)


def _file(file: File, stored: File) -> _File:
    """Return a file as it is copied. An encrypted one has its own authentication, and is not opened here."""
    return _File(stored.name, stored.size, file.digest, form_of(file.digest) if stored.name == file.name else None)


def _tasks(file: _File, arrived: Arrived, transfer: Transfer) -> Iterator[list[tuple[int, int]]]:
    """Yield the parts that are missing, as many at a time as one call of a thread copies."""
    found: list[tuple[int, int]] = []
    for offset, size in file.parts():
        if _is_there(file, arrived, offset, size):
            transfer.done(done_bytes=size, known_bytes=size)
            continue
        found.append((offset, size))
        if sum(size for _, size in found) >= TASK_BYTES:
            yield found
            found = []
    if found:
        yield found


def _is_there(file: _File, arrived: Arrived, offset: int, size: int) -> bool:
    """Return whether a part need not be copied. What came from a source of another kind has no digest yet."""
    return bool(arrived.digest(file.name, offset, size)) if file.form else arrived.has(file.name, offset, size)


def _copy_parts(source: Path, target: Path, file: _File, parts: list[tuple[int, int]], arrived: Arrived) -> None:
    reading = _open(source, READ, file)
    try:
        writing = _open(target, os.O_WRONLY, file)
        try:
            _allocate(writing, parts)
            with mmap(-1, BUFFER) as buffer, memoryview(buffer) as view:
                for offset, size in parts:
                    arrived.add(file.name, offset, size, _copy_part(reading, writing, view, file, offset, size))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _allocate(descriptor: int, parts: list[tuple[int, int]]) -> None:
    """Allocate what direct I/O will write in one piece: else threads wait for each other at every extent."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        begin, end = parts[0][0], parts[-1][0] + parts[-1][1]
        with suppress(OSError):  # a filesystem without it, or a full one, which the writes will say
            os.posix_fallocate(descriptor, begin, end - begin)


def _copy_part(reading: int, writing: int, buffer: memoryview, file: _File, offset: int, size: int) -> bytes:
    """Copy one part, and return its digest."""
    digest = file.form.new_hash() if file.form else None
    end = offset + size
    while offset < end:
        count = os.preadv(reading, [buffer[: min(BUFFER, _aligned(end - offset))]], offset)
        count = min(count, end - offset)
        if count <= 0:
            raise ImageDamaged(f"{file.name} is shorter than {file.size} bytes")
        content = buffer[:count]
        if digest is not None:
            digest.update(content)
        if _is_zeros(content):
            punch(writing, offset, _aligned(count))
        else:
            # The end of the file is written as a whole block, and cut off afterwards.
            _write(writing, buffer[: _aligned(count) if offset + count == file.size else count], offset)
        offset += count
    return digest.digest() if digest else b""


_ZEROS = bytes(BUFFER)


def _is_zeros(content: memoryview) -> bool:
    return content == memoryview(_ZEROS)[: len(content)]


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwritev(descriptor, [content], offset)
        offset, content = offset + written, content[written:]


def _aligned(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _open(path: Path, flags: int, file: _File) -> int:
    """Open a file without the page cache where its filesystem can do that: an image is read once, and is large."""
    descriptor = open_plain(path, flags=flags)
    if file.size < LEAST_DIRECT or (file.form and file.form.piece_bytes % BLOCK):
        return descriptor
    try:
        direct = open_plain(path, flags=flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a tmpfs, for example
            os.close(descriptor)
            raise
        return descriptor
    os.close(descriptor)
    return direct


def _require_same(file: _File, arrived: Arrived) -> None:
    if file.form is None:
        return
    leaves = [arrived.digest(file.name, offset, size) for offset, size in file.parts()]
    if file.form.text(leaves, file.size) != file.digest:
        raise ImageDamaged(f"{file.name} has other content than the image's manifest says")
