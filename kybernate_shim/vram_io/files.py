"""Files of saved regions: sparse, read and written by many threads in parallel, by direct I/O where that is faster.

Direct I/O is for block devices: several threads with a piece each keep the queue of an NVMe drive filled, and the bytes
evict nothing else from memory. Pieces, blocks and buffers are multiples of a page, as it demands.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from kybernate_shim.linux.mount.file_mount import only_open_here
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.linux.populate import POPULATE_WRITE, populate
from kybernate_shim.sizes import HUGE_PAGE
from kybernate_shim.vram_io.errors import FileFailed, VramError

CACHESTAT = 451  # Linux 6.5; the same number on x86-64 and arm64
MOST = 0.5
MANY_THREADS = 6  # two write 1.8 GB/s through the filesystem and 1.2 through a mapping, which costs page faults
PUNCH_HOLE = 0x1 | 0x2  # of fallocate(2), which keeps the size
TMPFS = 0x01021994
STATFS_LONGS = 32  # more than any struct statfs has


class RegionFile:
    """An open file. Offsets are explicit, so that threads can share it. Raises FileFailed and VramError."""

    def __init__(self, path: Path, fd: int, *, filled: bool = False) -> None:
        """`filled` says that it is all zeros, but no holes."""
        self.path = path
        self._fd = fd
        self._filled = filled
        self.size = os.fstat(fd).st_size

    def fileno(self) -> int:
        return self._fd

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`; a file that ends earlier is damaged."""
        done = 0
        while done < len(into):
            count = self._retried(os.preadv, into[done:], offset + done)
            if count == 0:
                raise VramError(f"{self.path} ends at {offset + done} bytes, {offset + len(into)} are needed")
            done += count

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._retried(os.pwritev, data[done:], offset + done)

    def leave_out(self, offset: int, size: int) -> None:
        """Have a hole where nothing was written."""
        if self._filled:
            punch(self._fd, offset, size)

    def spend(self, offset: int, size: int) -> None:
        """Note that a range is not needed any more; only a file that is kept for one reader frees it."""

    def leaf(self, offset: int, size: int, kind: str) -> bytes | None:
        """Return the digest of a range, where that was found when it was written; see digest.py for `kind`."""
        return None

    def has_data(self, offset: int, size: int) -> bool:
        """Return whether anything of a range is no hole; filesystems that do not know holes say yes."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) < offset + size
        except OSError as error:
            return error.errno != errno.ENXIO  # ENXIO: a hole up to the end

    def _retried(self, call: object, data: memoryview, offset: int) -> int:
        """Call preadv or pwritev, and again without direct I/O where the filesystem refuses that only now."""
        assert callable(call)
        while True:
            try:
                return int(call(self._fd, [data], offset))
            except OSError as error:
                if error.errno == errno.EINVAL and self._stop_direct():
                    continue
                verb = "read" if call is os.preadv else "written"
                raise FileFailed(f"{self.path} cannot be {verb}: {error.strerror}") from error

    def _stop_direct(self) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


class MappedFile(RegionFile):
    """A file in memory, written through a mapping of it.

    pwrite(2) admits one thread at a time to a file; in a mapping, all threads can make pages concurrently. They are
    made before they are written to, which detects a full filesystem; a write would end this process by SIGBUS.
    """

    def __init__(self, path: Path, fd: int, *, filled: bool = False) -> None:
        super().__init__(path, fd, filled=filled)
        self._map = mmap.mmap(fd, self.size)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._anchor)

    @property
    def view(self) -> memoryview:
        """The file itself, for a system call that fills it: without room, that fails by an error and not by SIGBUS."""
        return memoryview(self._map)

    def write(self, offset: int, data: memoryview) -> None:
        start = offset - offset % mmap.PAGESIZE
        if _libc().madvise(self._address + start, offset + len(data) - start, POPULATE_WRITE):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # before Linux 5.14
                super().write(offset, data)
                return
            reason = os.strerror(errno.ENOSPC if number == errno.EFAULT else number)
            raise FileFailed(f"{self.path} cannot be written: {reason}")
        _libc().memcpy(self._address + offset, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))

    def close(self) -> None:
        """Unmap the file, which the last reference does."""
        del self._anchor, self._map


class RoomyFile:
    """A file in memory that another process fills: its pages are made by threads of ours, before they are written to.

    `directory` has to be on a tmpfs. Raises FileFailed; `remove` undoes everything.
    """

    def __init__(self, path: Path, *, filled: bool = False) -> None:
        """`filled` says that it exists, with all of its pages; otherwise an existing file is an error."""
        self.path = path
        self._fd = _open(path, _flags(filled))
        self._map: mmap.mmap | None = None

    def fileno(self) -> int:
        return self._fd

    @property
    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def make_room(self, size: int, threads: int, cpus: set[int]) -> None:
        """Make it `size` bytes long, a multiple of the page, all of them in memory; after a failure it is empty.

        Missing pages are made near `cpus`, on which the threads run.
        """
        try:
            space, there = os.fstatvfs(self._fd), os.fstat(self._fd).st_size
            if space.f_blocks and space.f_bavail * space.f_frsize < size - there:  # no blocks: nothing limits it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
            there -= there % HUGE_PAGE
            if there < size:
                address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
                populate(address + there, size - there, threads, cpus)
        except OSError as error:
            self._map = None
            os.ftruncate(self._fd, 0)
            raise FileFailed(f"{self.path} cannot be extended to {size} bytes: {error.strerror}") from error

    def punch(self, offset: int, size: int) -> None:
        """Free the memory of a range, which reads as zeros then."""
        punch(self._fd, offset, size)

    def only_open_here(self) -> bool:
        """Return whether no other process has the file open or mapped."""
        return only_open_here(self._fd)

    def read(self, offset: int, into: memoryview) -> None:
        """Do as RegionFile.read: unlike with `view`, a file that another process has truncated is an error."""
        RegionFile(self.path, self._fd).read(offset, into)

    def empty(self) -> None:
        """Free all of its memory, even where other processes have it open."""
        self._map = None
        os.ftruncate(self._fd, 0)

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap the file, which its last view does."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def lies_in_memory(directory: Path) -> bool:
    """Return whether a directory is on a tmpfs."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _on_tmpfs(fd)
    finally:
        os.close(fd)


@contextmanager
def writing(
    path: Path, size: int, direct: bool | None = None, threads: int = 1, *, filled: bool = False
) -> Iterator[RegionFile]:
    """Create a file of `size` bytes, which is one hole, readable only by root; an existing file is an error.

    With `filled`, it has to exist, all zeros and without holes. `threads` will write to it at the same time.
    """
    fd = _open(path, _flags(filled))
    try:
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            path.unlink()
            raise FileFailed(f"{path} cannot be extended to {size} bytes: {error.strerror}") from error
        if direct or (direct is None and _on_block_device(fd)):
            _ask_direct(fd)
        elif size and threads >= MANY_THREADS and _on_tmpfs(fd):
            mapped = MappedFile(path, fd, filled=filled)
            try:
                yield mapped
            finally:
                mapped.close()
            return
        yield RegionFile(path, fd, filled=filled)
    finally:
        os.close(fd)


@contextmanager
def reading(path: Path, direct: bool | None = None) -> Iterator[RegionFile]:
    """Open a file for reading, by direct I/O unless it is in memory already."""
    fd = _open(path, os.O_RDONLY)
    try:
        if direct or (direct is None and _on_block_device(fd) and not _mostly_cached(fd)):
            _ask_direct(fd)
        yield RegionFile(path, fd)
    finally:
        os.close(fd)


def is_in_memory(path: Path) -> bool:
    """Return whether most of a file's data is in memory, so that reading it needs no disk."""
    fd = _open(path, os.O_RDONLY)
    try:
        return _mostly_cached(fd)
    finally:
        os.close(fd)


def is_mappable(path: Path) -> bool:
    """Return whether a mapping can replace a copy: all data is in memory or on a disk of this machine."""
    fd = _open(path, os.O_RDONLY)
    try:
        return _on_tmpfs(fd) or _on_block_device(fd) or _cached_share(fd) >= 1
    finally:
        os.close(fd)


def _flags(filled: bool) -> int:
    return os.O_RDWR if filled else os.O_RDWR | os.O_CREAT | os.O_EXCL


def punch(fd: int, offset: int, size: int) -> None:
    """Make a hole; where that is not possible, the range stays as it is."""
    _libc().fallocate(fd, PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(size))


def _open(path: Path, flags: int) -> int:
    try:
        if not flags & os.O_CREAT:
            return open_plain(path, flags=flags)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise FileFailed(f"{path} cannot be opened: {error.strerror}") from error


def _on_block_device(fd: int) -> bool:
    """Filesystems without a block device (tmpfs, overlay, NFS, btrfs) have device numbers with major 0."""
    return os.major(os.fstat(fd).st_dev) != 0


def _on_tmpfs(fd: int) -> bool:
    found = (ctypes.c_long * STATFS_LONGS)()  # the first one is the type
    return _libc().fstatfs(fd, ctypes.byref(found)) == 0 and found[0] == TMPFS


def _ask_direct(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: it leaves the interpreter lock
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    library.memcpy.restype = ctypes.c_void_p
    return library


class _CacheStatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


def _mostly_cached(fd: int) -> bool:
    """Where the kernel cannot report it, files are read through the cache, as always."""
    return _cached_share(fd, unknown=1) >= MOST


def _cached_share(fd: int, unknown: float = 0) -> float:
    """Return how much of a file's data cachestat(2) finds in memory; holes are no data."""
    found = (ctypes.c_uint64 * 5)()  # pages: cached, dirty, in write-back, evicted, recently evicted
    whole = _CacheStatRange(0, 0)
    if _libc().syscall(CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), 0) < 0:
        return unknown
    data_pages = os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE
    return found[0] / data_pages if data_pages else 1
