"""All files of an encrypted checkpoint image: encrypted, decrypted, compared with their digests, by several threads.

What a file looks like is said in trust/encryption.py. Here is what they are together: one data key, and the manifest
that says which of the two forms of the image counts.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Final, Literal

from kybernate_shim.checkpoint import digests
from kybernate_shim.checkpoint.image import CheckpointInvalid, Image, Problem, read_image, write_manifest
from kybernate_shim.checkpoint.manifest import Encryption, File, Manifest
from kybernate_shim.checkpoint.signature import sign, signer_of
from kybernate_shim.config import Config
from kybernate_shim.cuda.vram import digest as vram_digest
from kybernate_shim.cuda.vram.errors import VramError
from kybernate_shim.errors import Refused
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
from kybernate_shim.trust.keys import Key, signing_key, verifying_keys

PIECE_CHUNKS: Final = 64  # chunks that a thread takes at a time
MOST_THREADS: Final = 8  # as for digests
MOST_READ: Final = 64 << 20

EachChunk = Callable[[Sequence[int], Callable[[int, Buffers], int], int], None]


class ImageInUse(Refused):
    """Another process encrypts or decrypts the image."""


class Stopped(Exception):
    """The work was ended by `Run.stop`; its files are not complete."""


@dataclass(frozen=True)
class Run:
    """How work on an image is followed and ended. `on_progress` is told how many more bytes are done, by any thread."""

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
    names: Sequence[str], source: Path, target: Path, *, image: str, key: NodeKey, run: Run | None = None
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
    return Sealed(Encryption(wrapped.key_id, wrapped.wrapped, CHUNK_BYTES), _each_file(sizes, encrypt, run or Run()))


def decrypt_files(
    files: Iterable[File], source: Path, target: Path, *, image: str, data_key: bytes, run: Run | None = None
) -> None:
    """Decrypt files of `source` into new files of `target`, holes included.

    Raises EncryptionBroken, OSError and Stopped.
    """
    wanted = {file.name: file.size for file in files}

    def decrypt(name: str, each: EachChunk) -> int:
        with _opened(source, name, wanted[name], image, data_key) as file, _creating(target / name) as plain:
            os.ftruncate(plain, file.layout.size)
            each(file.layout.data, partial(_decrypt_chunk, file, plain), file.layout.chunk_bytes)
            return file.layout.size

    _each_file(wanted, decrypt, run or Run())


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
    """Return the data key of an encrypted image. Raises KeyUnusable and CheckpointInvalid."""
    assert manifest.encryption is not None
    wrapped = WrappedKey(manifest.encryption.key_id, manifest.encryption.wrapped_key)
    try:
        return encryption_keys.data_key(encryption_key, wrapped, manifest.id)
    except EncryptionBroken as error:
        raise CheckpointInvalid(str(error)) from error


def read_file(image: Image, name: str, encryption_key: Path | None) -> bytes:
    """Return the content of a small file of an image, which may be encrypted.

    Raises FileNotFoundError, OSError, KeyUnusable and CheckpointInvalid.
    """
    if image.manifest.encryption is None:
        return read_plain(image.path / name, most=MOST_READ)
    size = next((file.size for file in image.manifest.files if file.name == name), None)
    if size is None:
        raise FileNotFoundError(f"{image.path / name}: the manifest does not list it")
    if size > MOST_READ:
        raise CheckpointInvalid(f"{image.path / name}: {size} bytes, {MOST_READ} at most are read at once")
    data_key = data_key_of(image.manifest, encryption_key)
    try:
        with _opened(image.path, name, size, image.manifest.id, data_key) as file:
            return b"".join(map(bytes, file.blocks(0, size)))
    except EncryptionBroken as error:
        raise CheckpointInvalid(f"{image.path}: {error}") from error


# -- Digests ----------------------------------------------------------------------------------------------------------


def digest_problems(
    directory: Path,
    manifest: Manifest,
    files: Iterable[File],
    encryption_key: Path | None,
    count: Callable[[int], object],
) -> list[Problem]:
    """Compare encrypted files with the digests of what is in them; nothing is kept. Raises KeyUnusable."""
    data_key = data_key_of(manifest, encryption_key)
    problems = []
    with ThreadPoolExecutor(_threads(), "decrypt") as pool:
        for wanted in files:
            try:
                with _opened(directory, wanted.name, wanted.size, manifest.id, data_key) as file:
                    found = _digest(file, wanted.digest, pool, count)
            except (EncryptionBroken, digests.DigestUnknown, VramError, OSError) as error:
                problems.append(Problem(f"{wanted.name}{SUFFIX}", "unreadable", str(error)))
                continue
            if found != wanted.digest:
                detail = f"digest {found} found, {wanted.digest} expected"
                problems.append(Problem(f"{wanted.name}{SUFFIX}", "changed", detail))
    return problems


def _digest(file: EncryptedFile, like: str, pool: ThreadPoolExecutor, count: Callable[[int], object]) -> str:
    """Return the digest of a file's content, of the kind of `like`."""
    size = file.layout.size
    if not vram_digest.is_of_tree(like):
        algorithm = digests.algorithm_of(like)

        def leaf(start: int) -> bytes:
            hash = digests.new_hash(algorithm)
            for block in file.blocks(start, min(size, start + digests.PIECE)):
                hash.update(block)
                count(len(block))
            return hash.digest()

        return digests.joined(algorithm, list(pool.map(leaf, range(0, max(1, size), digests.PIECE))))
    tree = vram_digest.tree_like(like, size)
    piece = tree.piece_bytes

    def add(start: int) -> None:
        data = bytearray()
        for block in file.blocks(start, min(size, start + piece)):
            data += block
        tree.add(start, memoryview(data))
        count(len(data))

    list(pool.map(add, range(0, size, piece)))
    return tree.text()


# -- An image in place ------------------------------------------------------------------------------------------------

Outcome = Literal["encrypted", "decrypted", "wrapped again", "nothing to do"]


def encrypt_image(
    directory: Path, encryption_key: Path, config: Config, run: Run | None = None
) -> tuple[Image, Outcome]:
    """Encrypt an image where it is, with the first key of the file; only its data key where it is encrypted already.

    At any moment the manifest names one form of the image that is whole: files of the new form come first, those of the
    old one go last. What a run that was killed has left is removed by the next one. An image that was signed is signed
    again. Raises CheckpointNotFound, CheckpointInvalid, ImageForeign, KeyUnusable, ImageInUse, OSError and Stopped.
    """
    key = encryption_keys.read_keys(encryption_key)[0]
    with _locked(directory):
        image = read_image(directory)
        manifest = image.manifest
        signer = _signer(image, config)
        if manifest.encryption is None:
            _unlink(directory, (f"{file.name}{SUFFIX}" for file in manifest.files))
            names = [file.name for file in manifest.files]
            with _removed_on_failure(directory, (f"{name}{SUFFIX}" for name in names)):
                sealed = encrypt_files(names, directory, directory, image=manifest.id, key=key, run=run)
            _write_signed(directory, sealed.manifest(manifest), signer)
            outcome: Outcome = "encrypted"
        elif manifest.encryption.key_id != key.id:
            wrapped = key.wrap(data_key_of(manifest, encryption_key), manifest.id)
            encryption = replace(manifest.encryption, key_id=wrapped.key_id, wrapped_key=wrapped.wrapped)
            _write_signed(directory, replace(manifest, encryption=encryption), signer)
            outcome = "wrapped again"
        else:
            outcome = "nothing to do"
        _unlink(directory, (file.name for file in manifest.files))
        return read_image(directory), outcome


def decrypt_image(
    directory: Path, encryption_key: Path | None, config: Config, run: Run | None = None
) -> tuple[Image, Outcome]:
    """Decrypt an image where it is, as safely as `encrypt_image`. Raises as that."""
    with _locked(directory):
        image = read_image(directory)
        manifest, plain = image.manifest, plain_manifest(image.manifest)
        names = [file.name for file in manifest.files]
        outcome: Outcome = "nothing to do"
        if manifest.encryption is not None:
            signer = _signer(image, config)
            data_key = data_key_of(manifest, encryption_key)
            _unlink(directory, names)
            with _removed_on_failure(directory, names), _as_invalid(directory):
                decrypt_files(manifest.files, directory, directory, image=manifest.id, data_key=data_key, run=run)
            _write_signed(directory, plain, signer)
            outcome = "decrypted"
        _unlink(directory, (f"{name}{SUFFIX}" for name in names))
        return read_image(directory), outcome


def _signer(image: Image, config: Config) -> Key | None:
    """Return the key that signs the image in its new form; None for an image that is not signed.

    Raises ImageForeign: who signs a manifest again vouches for it.
    """
    if not image.manifest.signature.key:
        return None
    signer_of(image.content, image.manifest, verifying_keys(config))
    return signing_key(config)


def _write_signed(directory: Path, manifest: Manifest, key: Key | None) -> None:
    write_manifest(directory, sign(manifest, key) if key is not None else manifest)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield  # `read_image` says what is missing
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ImageInUse(f"{directory}: another process encrypts or decrypts it; wait until that ends") from None
        yield
    finally:
        os.close(fd)


@contextmanager
def _removed_on_failure(directory: Path, names: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _unlink(directory, names)
        raise


@contextmanager
def _as_invalid(directory: Path) -> Iterator[None]:
    """Let an EncryptionBroken be a CheckpointInvalid, which names the image."""
    try:
        yield
    except EncryptionBroken as error:
        raise CheckpointInvalid(f"{directory}: {error}") from error


def _unlink(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


# -- Files and threads ------------------------------------------------------------------------------------------------


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
def _opened(directory: Path, name: str, size: int, image: str, data_key: bytes) -> Iterator[EncryptedFile]:
    """Give the encrypted file of that name, whose content has to have `size` bytes."""
    with _reading(directory / f"{name}{SUFFIX}") as fd:
        file = EncryptedFile(fd, FileKey(data_key, image, name))
        if file.layout.size != size:
            raise EncryptionBroken(f"{name}: {file.layout.size} bytes are in it, {size} were expected")
        yield file


def _each_file(sizes: Mapping[str, int], work: Callable[[str, EachChunk], int], run: Run) -> dict[str, int]:
    """Do `work` on each file: on many small ones concurrently, or on the parts of a large one. Return the results."""

    def in_order(chunks: Sequence[int], each: Callable[[int, Buffers], int], chunk_bytes: int) -> None:
        buffers = Buffers(chunk_bytes)
        for chunk in chunks:
            if run.stop.is_set():
                raise Stopped
            run.on_progress(each(chunk, buffers))

    large = [name for name, size in sizes.items() if size > PIECE_CHUNKS * CHUNK_BYTES]
    small = [name for name, size in sizes.items() if size <= PIECE_CHUNKS * CHUNK_BYTES]
    with ThreadPoolExecutor(_threads(), "encryption") as pool:

        def in_pieces(chunks: Sequence[int], each: Callable[[int, Buffers], int], chunk_bytes: int) -> None:
            pieces = [chunks[first : first + PIECE_CHUNKS] for first in range(0, len(chunks), PIECE_CHUNKS)]
            list(pool.map(lambda piece: in_order(piece, each, chunk_bytes), pieces))

        done = {name: work(name, in_pieces) for name in large}
        done.update(zip(small, pool.map(lambda name: work(name, in_order), small), strict=True))
    return done


def _threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


class Counter:
    """Adds up what threads have done, for a record that shows one number."""

    def __init__(self, show: Callable[[int], object]) -> None:
        self._done, self._lock, self._show = 0, Lock(), show

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._show(self._done)
