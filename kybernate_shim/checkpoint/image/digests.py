"""Digests of an image's files, computed in threads, and of growing files while they are still being written.

A file of up to 64 MiB has the plain digest of its bytes, `xxh128:<hex>`, as `xxh128sum` prints it. A longer one has the
digest of its pieces' digests (each 64 MiB, the last one shorter, joined as raw bytes), `xxh128-tree:<hex>`: so that one
file of 80 GiB keeps all cores busy. What CRIU writes is digested right behind it, as long as it is in the CPU's
cache, and by more threads where one cannot keep up. They are nice to CRIU meanwhile: it and its code in the dumped
process call each other hundreds of times a GiB, and each time the called one might wait for a core that digests.

XXH3 with 128 bits is the default: as fast as memory on any core, where BLAKE3 makes 4 GB/s and SHA-256 half of that;
then digests would take longer than CRIU itself. It finds every flipped bit and every torn page, but no forgery. That is
enough for an image that lies where only root can write. BLAKE3 finds forgery, too: it digests images that leave the
node, so that the signature over the manifest covers their content. `sha256` and `blake2b` are read as well.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from kybernate_shim.checkpoint.image.manifest import File
from kybernate_shim.errors import Stopped
from kybernate_shim.linux.plain_files import open_plain

PIECE: Final = 64 << 20
BUFFER: Final = 256 << 10  # stays in a core's own cache between reading and hashing; half as fast with 4 MiB
DEFAULT: Final = "xxh128"
STRONG: Final = "blake3"
GROWING: Final = "pages-*.img"  # CRIU only ever appends to them
NICEST: Final = 10  # as long as files grow; nicer ones might be stopped for long with the interpreter's lock
PAUSE: Final = 0.01  # seconds between two looks at growing files, in which CRIU writes less than such a cache holds


class FileUnreadable(Exception):
    """A file is not what its manifest says, changes while it is read, or has a digest that this release cannot make."""


class Hash(Protocol):
    def update(self, data: memoryview | bytes, /) -> object: ...
    def digest(self) -> bytes: ...


def _sha256() -> Hash:
    """OpenSSL's uses the CPU's SHA extensions; a daemon has not loaded it for less."""
    try:
        from _hashlib import openssl_sha256
    except ImportError:
        return hashlib.sha256()
    return openssl_sha256()


class Crc32:
    """zlib's CRC-32 in the shape of a hash."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview | bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def new_hash(algorithm: str) -> Hash:
    """Return an empty hash. Raises FileUnreadable."""
    if algorithm == "xxh128":
        from xxhash import xxh3_128  # most containers are never checkpointed

        return xxh3_128()
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3()
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=32)
    if algorithm == "sha256":
        return _sha256()
    if algorithm == "crc32":
        return Crc32()
    raise FileUnreadable(f"{algorithm!r}: no such digest algorithm here")


def algorithm_of(digest: str) -> str:
    """Return the algorithm that made `digest`. Raises FileUnreadable when there is none of that name."""
    algorithm = digest.partition(":")[0].removesuffix("-tree")
    new_hash(algorithm)
    return algorithm


def joined(algorithm: str, pieces: Sequence[bytes]) -> str:
    """Return the digest of a file by those of its pieces; an empty file is one empty piece."""
    if len(pieces) == 1:
        return f"{algorithm}:{pieces[0].hex()}"
    tree = new_hash(algorithm)
    tree.update(b"".join(pieces))
    return f"{algorithm}-tree:{tree.digest().hex()}"


@dataclass
class _Piece:
    """A part of a file from byte `start` on, of which `done` bytes are in `hash`."""

    start: int
    hash: Hash
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Growing:
    """A file of which `pieces` are digested or on their way, and `next` is begun. `identity` is device and inode."""

    identity: tuple[int, int]
    next: _Piece
    pieces: list[Future[bytes]] = field(default_factory=list)


class Digester:
    """Digests files in a pool of threads. Its methods may be called from any thread.

    `progress` is called with the number of further bytes done, from the pool's threads.
    """

    def __init__(self, algorithm: str = DEFAULT, progress: Callable[[int], object] | None = None) -> None:
        new_hash(algorithm)
        self._algorithm = algorithm
        self._progress = progress or (lambda _: None)
        # More threads than eight only contend for memory bandwidth.
        self._pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "digest")
        self._files: dict[Path, _Growing] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._usual_nice = self._nice = os.getpriority(os.PRIO_PROCESS, 0)

    def __enter__(self) -> Digester:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """Have whatever runs end soon, with Stopped: no digest is wanted any more."""
        self._stopped.set()

    @contextmanager
    def following(self, directory: Path, pattern: str = GROWING) -> Iterator[None]:
        """Digest the files that grow in `directory` while the body runs; they must only be appended to."""
        done = threading.Event()
        thread = threading.Thread(target=self._follow, args=(directory, pattern, done), name="follow", daemon=True)
        self._nice = NICEST
        thread.start()
        try:
            yield
        finally:
            self._nice = self._usual_nice
            done.set()
            thread.join()

    def _follow(self, directory: Path, pattern: str, done: threading.Event) -> None:
        while not done.wait(PAUSE):
            try:
                for path in directory.glob(pattern):
                    self._keep_up(path)
            except FileNotFoundError:
                continue  # the directory or the file comes later, or is gone, which `files` will notice

    def _keep_up(self, path: Path) -> None:
        """Digest what has come, the piece that was begun in this thread: a second one would be in CRIU's way."""
        size = path.stat().st_size
        with self._lock:
            growing = self._files.get(path)
        if growing is not None:
            self._feed(path, growing.next, min(PIECE, size - growing.next.start))
        self._advance(path, complete=False)

    def begin(self, path: Path) -> None:
        """Have the pool digest a finished file, for `files` or `digest` to return it later. Raises OSError,
        FileUnreadable."""
        self._advance(path, complete=True)

    def files(self, directory: Path, names: list[str]) -> tuple[File, ...]:
        """Return the entries of the finished files `names`, in that order. Raises OSError and FileUnreadable."""
        sizes = [self._advance(directory / name, complete=True) for name in names]
        entries = []
        for name, size in zip(names, sizes, strict=True):
            with self._lock:
                growing = self._files.pop(directory / name)
            entries.append(File(name, size, joined(self._algorithm, [piece.result() for piece in growing.pieces])))
        return tuple(entries)

    def digest(self, path: Path) -> str:
        """Return the digest of one finished file."""
        return self.files(path.parent, [path.name])[0].digest

    def _advance(self, path: Path, *, complete: bool) -> int:
        status = path.lstat()
        identity = (status.st_dev, status.st_ino)
        with self._lock:
            growing = self._files.get(path)
            if growing is None or growing.identity != identity:
                growing = self._files[path] = _Growing(identity, self._begin(0))
            # An empty file is one empty piece.
            whole = max(1, -(-status.st_size // PIECE)) if complete else status.st_size // PIECE
            begun = growing.next.start + growing.next.done if growing.next.done else 0
            if len(growing.pieces) > whole or begun > status.st_size:
                raise _shorter(path)
            for index in range(len(growing.pieces), whole):
                length = min(PIECE, status.st_size - index * PIECE)
                growing.pieces.append(self._pool.submit(self._finish, path, growing.next, length))
                growing.next = self._begin((index + 1) * PIECE)
        return status.st_size

    def _begin(self, start: int) -> _Piece:
        return _Piece(start, new_hash(self._algorithm))

    def _finish(self, path: Path, piece: _Piece, length: int) -> bytes:
        if not self._feed(path, piece, length):
            raise _shorter(path)
        return piece.hash.digest()

    def _feed(self, path: Path, piece: _Piece, length: int) -> bool:
        """Digest the piece up to `length` bytes, and return whether the file has them."""
        fd = open_plain(path)
        try:
            with piece.lock:
                buffer = memoryview(bytearray(min(BUFFER, max(0, length - piece.done))))
                while piece.done < length:
                    if self._stopped.is_set():
                        raise Stopped(f"{path}: not digested to its end")
                    self._be_nice()
                    count = os.preadv(fd, [buffer[: length - piece.done]], piece.start + piece.done)
                    if count == 0:
                        return False
                    piece.hash.update(buffer[:count])
                    piece.done += count
                    self._progress(count)
        finally:
            os.close(fd)
        return True

    def _be_nice(self) -> None:
        """Give this thread, on Linux no other, the niceness that is due now."""
        if os.getpriority(os.PRIO_PROCESS, 0) != self._nice:
            with suppress(PermissionError):  # without CAP_SYS_NICE it cannot be undone: the rest is only slower
                os.setpriority(os.PRIO_PROCESS, 0, self._nice)


def _shorter(path: Path) -> FileUnreadable:
    return FileUnreadable(f"{path}: became shorter while it was being digested")
