"""All files of an encrypted checkpoint image: encrypted, decrypted, compared with their digests, by several threads.

What a file looks like is said in trust/encryption.py. Here is what they are together: one data key, and the manifest
that says which of the two forms of the image counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final

from kybernate_shim.checkpoint.image.manifest import Encryption, File, Manifest
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image
from kybernate_shim.errors import Stopped
from kybernate_shim.linux.plain_files import open_plain, read_plain
from kybernate_shim.trust import encryption_keys
from kybernate_shim.trust.encryption import (
    CHUNK_BYTES,
    SUFFIX,
    Buffers,
    EncryptedFile,
    EncryptingFile,
    EncryptionBroken,
    FileKey,
    NodeKey,
    WrappedKey,
    new_data_key,
    write_all,
)

PIECE_CHUNKS: Final = 64  # chunks that a thread takes at a time
MOST_THREADS: Final = 8  # as for digests
MOST_READ: Final = 64 << 20

EachChunk = Callable[[Sequence[int], Callable[[int, Buffers], int], int], None]


@dataclass(frozen=True)
class CipherRun:
    """How work on an image is followed and ended.

    `on_progress` is called with the number of further bytes done, from any thread.
    """

    on_progress: Callable[[int], object] = lambda count: None
    stop: Event = field(default_factory=Event)


@dataclass(frozen=True)
class Sealed:
    """What the manifest has to say of files that were encrypted. `stored` are their sizes on the disk, by name."""

    encryption: Encryption
    stored: Mapping[str, int]

    def manifest(self, plain: Manifest) -> Manifest:
        files = tuple(replace(file, stored=self.stored[file.name]) for file in plain.files)
        return replace(plain, files=files, encryption=self.encryption)


def encrypt_files(
    names: Sequence[str], source: Path, target: Path, *, image: str, key: NodeKey, run: CipherRun | None = None
) -> Sealed:
    """Encrypt files of `source` into new files of `target`, with a new data key for the image of id `image`.

    Raises OSError and Stopped.
    """
    data_key = new_data_key()
    wrapped = key.wrap(data_key, image)

    def encrypt(name: str, each: EachChunk) -> int:
        with _reading(source / name) as plain, _creating(target / f"{name}{SUFFIX}") as sealed:
            file = EncryptingFile(plain, sealed, FileKey(data_key, image, name))
            file.begin()
            each(file.layout.data, file.encrypt, CHUNK_BYTES)
            return file.layout.stored

    sizes = {name: (source / name).stat().st_size for name in names}
    return Sealed(
        Encryption(wrapped.key_id, wrapped.wrapped, CHUNK_BYTES), _each_file(sizes, encrypt, run or CipherRun())
    )


def decrypt_files(
    files: Iterable[File], source: Path, target: Path, *, image: str, data_key: bytes, run: CipherRun | None = None
) -> None:
    """Decrypt files of `source` into new files of `target`, holes included.

    Raises EncryptionBroken, OSError and Stopped.
    """
    wanted = {file.name: file.size for file in files}

    def decrypt(name: str, each: EachChunk) -> int:
        with open_encrypted(source, name, wanted[name], image, data_key) as file, _creating(target / name) as plain:
            os.ftruncate(plain, file.layout.size)
            each(file.layout.data, partial(_decrypt_chunk, file, plain), file.layout.chunk_bytes)
            return file.layout.size

    _each_file(wanted, decrypt, run or CipherRun())


def _decrypt_chunk(file: EncryptedFile, target: int, chunk: int, buffers: Buffers) -> int:
    plain = file.decrypt(chunk, buffers)
    write_all(target, plain, chunk * file.layout.chunk_bytes)
    return len(plain)


def plain_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest of the same image with its files decrypted."""
    return replace(manifest, files=tuple(replace(file, stored=0) for file in manifest.files), encryption=None)


def memory_bytes(files: Iterable[File]) -> int:
    """Return about how much memory the decrypted files take: their holes take none."""
    return sum(min(file.size, file.stored) for file in files)


def data_key_of(manifest: Manifest, encryption_key: Path | None) -> bytes:
    """Return the data key of an encrypted image. Raises Refused and CheckpointInvalid."""
    assert manifest.encryption is not None
    wrapped = WrappedKey(manifest.encryption.key_id, manifest.encryption.wrapped_key)
    try:
        return encryption_keys.data_key(encryption_key, wrapped, manifest.id)
    except EncryptionBroken as error:
        raise CheckpointInvalid(str(error)) from error


def read_file(image: Image, name: str, encryption_key: Path | None) -> bytes:
    """Return the content of a small file of an image, which may be encrypted.

    Raises FileNotFoundError, OSError, Refused and CheckpointInvalid.
    """
    if image.manifest.encryption is None:
        return read_plain(image.path / name, most=MOST_READ)
    size = next((file.size for file in image.manifest.files if file.name == name), None)
    if size is None:
        raise FileNotFoundError(f"{image.path / name}: the manifest does not list it")
    if size > MOST_READ:
        raise CheckpointInvalid(f"{image.path / name}: {size} bytes, {MOST_READ} at most are read in one call")
    data_key = data_key_of(image.manifest, encryption_key)
    try:
        with open_encrypted(image.path, name, size, image.manifest.id, data_key) as file:
            return b"".join(map(bytes, file.blocks(0, size)))
    except EncryptionBroken as error:
        raise CheckpointInvalid(f"{image.path}: {error}") from error


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    fd = open_plain(path)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _creating(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_encrypted(directory: Path, name: str, size: int, image: str, data_key: bytes) -> Iterator[EncryptedFile]:
    """Give the encrypted file of that name, whose content has to have `size` bytes."""
    with _reading(directory / f"{name}{SUFFIX}") as fd:
        file = EncryptedFile(fd, FileKey(data_key, image, name))
        if file.layout.size != size:
            raise EncryptionBroken(f"{name}: {file.layout.size} bytes found, {size} expected")
        yield file


def _each_file(sizes: Mapping[str, int], work: Callable[[str, EachChunk], int], run: CipherRun) -> dict[str, int]:
    """Do `work` on each file: on many small ones concurrently, or on the parts of a large one. Return the results."""

    def in_order(chunks: Sequence[int], each: Callable[[int, Buffers], int], chunk_bytes: int) -> None:
        buffers = Buffers(chunk_bytes)
        for chunk in chunks:
            if run.stop.is_set():
                raise Stopped
            run.on_progress(each(chunk, buffers))

    large = [name for name, size in sizes.items() if size > PIECE_CHUNKS * CHUNK_BYTES]
    small = [name for name, size in sizes.items() if size <= PIECE_CHUNKS * CHUNK_BYTES]
    with ThreadPoolExecutor(threads(), "encryption") as pool:

        def in_pieces(chunks: Sequence[int], each: Callable[[int, Buffers], int], chunk_bytes: int) -> None:
            pieces = [chunks[first : first + PIECE_CHUNKS] for first in range(0, len(chunks), PIECE_CHUNKS)]
            list(pool.map(lambda piece: in_order(piece, each, chunk_bytes), pieces))

        done = {name: work(name, in_pieces) for name in large}
        done.update(zip(small, pool.map(lambda name: work(name, in_order), small), strict=True))
    return done


def threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))
