"""Memory for the files of a dump while its container is frozen, where the disk would make the dump wait.

A write to a file of a local disk is a copy into the page cache, as long as not too much of the node's memory waits to
be written to disks: from then on the kernel makes each writer wait for them. Network filesystems, and those mounted
with `sync`, wait at each write or when a file is closed. A container that is frozen waits as long. So there the files
go to a tmpfs, at the speed of memory, and are copied to their directory when the container runs again.

The name of each such tmpfs has the bytes that it may take, so that all daemons of the node together keep to one limit,
and those of a daemon that was killed count no more.
Source: the kernel's mm/page-writeback.c, balance_dirty_pages.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.plaintext_memory import private_memory, remove_stale
from kybernate_shim.errors import Stopped
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.cgroup.headroom import headroom
from kybernate_shim.linux.kernel_text import lines_of, text_of
from kybernate_shim.linux.locks import held, lock_directory
from kybernate_shim.linux.mount.mountinfo import IN_MEMORY, mount_at
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.linux.private_files import create_private, make_directory
from kybernate_shim.run_directory import DUMPS
from kybernate_shim.sizes import HUGE_PAGE

TOLERABLE: Final = 0.5  # seconds that a dump may wait for its disk: less is not worth a second copy of its files
SPARE: Final = 256 << 20  # what a dump may have beyond the memory of its processes: removed files, pipes, page tables
VMSTAT: Final = Path("/proc/vmstat")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
CHUNK: Final = 8 << 20  # bytes of one copy, after which it can be stopped
THREADS: Final = 4
TRIAL: Final = ".kybernate-trial"  # a file that is written to measure a directory
TRIAL_BYTES: Final = 64 << 20
TRIAL_CHUNK: Final = 1 << 20
TRIAL_SECONDS: Final = 0.25
REWRITTEN: Final = frozenset({"dump.log", "stats-dump"})  # CRIU's, which a client may have wanted in that directory
# Those that write into the page cache and wait for nothing else, neither at a write nor when a file is closed.
LOCAL: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs"})


def memory_wanted(needed: int, page_cache: int, rate: Callable[[], float], *, limited: bool) -> int:
    """Return how many bytes of memory a dump of about `needed` bytes should get, 0 where the disk does.

    `page_cache` takes so many bytes without a wait, and `rate` measures at how many bytes a second the disk takes more.
    Where the freeze is `limited`, the disk has no part in it if that can be avoided: another program's writes, a second
    later, would take away what the page cache has now.
    """
    beyond = needed - (page_cache >> 1 if limited else page_cache)
    if beyond <= 0 or (not limited and beyond / rate() <= TOLERABLE):
        return 0
    return needed + max(needed >> 3, SPARE)


def page_cache_room(directory: Path, vmstat: Path = VMSTAT) -> int:
    """Return how many bytes can be written to files in `directory` before the kernel makes the writer wait.

    All on a tmpfs. The limit is half the way between where the kernel begins to write back and where nothing is
    written any more before that is done. Raises OSError.
    """
    mount = mount_at(directory)
    if mount is not None and mount.type in IN_MEMORY:
        return sys.maxsize
    if mount is None or mount.type not in LOCAL or "sync" in (*mount.options, *mount.super_options):
        return 0
    pages = dict(line.split() for line in lines_of(text_of(vmstat)))
    most = (int(pages["nr_dirty_threshold"]) + int(pages["nr_dirty_background_threshold"])) // 2
    return max(0, most - int(pages["nr_dirty"]) - int(pages["nr_writeback"])) * PAGE


def memory_room(limit: int) -> int:
    """Return how many bytes the next dump may take where all of the node's together have `limit`.

    Half of what is available, on the node and in the cgroup of this process, stays with other programs. What a dump has
    reserved and filled already counts twice in that, which only makes it less.
    """
    reserved = sum(_reserved())
    return min(limit - reserved, (_available() - reserved) // 2)


def _available() -> int:
    return headroom(Cgroup.of(os.getpid())).bytes


def _reserved() -> Iterator[int]:
    with suppress(FileNotFoundError):
        for directory in DUMPS.iterdir():
            size = directory.name.rsplit(".", 3)[1:2]
            yield from (int(one) for one in size if one.isdecimal())


@contextmanager
def memory_for_dump(name: str, target: Path, needed: int, limit: int, *, limited: bool) -> Iterator[Path | None]:
    """Yield an empty directory in memory for a dump of about `needed` bytes into `target`; None where it needs none.

    There is none either where the node has not the memory. `name` says what it is for. It goes with all that is in
    it. Blocks. Raises OSError.
    """
    with ExitStack() as stack:
        directory = None
        rate = partial(write_rate, target, flushed=True)
        if limit and (size := memory_wanted(needed, page_cache_room(target), rate, limited=limited)):
            make_directory(DUMPS.parent)
            with held(lock_directory(DUMPS.parent)):
                remove_stale(DUMPS)
                if size <= memory_room(limit):
                    memory = private_memory(DUMPS, f"{name}.{size}", size=size, may_be_swapped=True)
                    directory = stack.enter_context(memory)
        yield directory


def write_rate(directory: Path, *, flushed: bool) -> float:
    """Return at how many bytes a second files are written to a directory; `flushed`, at how many they are on its disk.

    Blocks for a fraction of a second, or for one flush. Raises OSError.
    """
    path, chunk = directory / TRIAL, os.urandom(4096) * (TRIAL_CHUNK // 4096)
    begin, done = time.monotonic(), 0
    try:
        with create_private(path) as file:
            while done < TRIAL_BYTES and time.monotonic() - begin < TRIAL_SECONDS:
                done += os.write(file.fileno(), chunk)
            if flushed:
                os.fdatasync(file.fileno())
        return done / max(time.monotonic() - begin, 1e-6)
    finally:
        path.unlink(missing_ok=True)


def is_full(directory: Path) -> bool:
    """Return whether nothing more can be written there: its memory comes in huge pages, too."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize < HUGE_PAGE


def write_out(
    source: Path, target: Path, progress: Callable[[int], object], stopped: Callable[[], bool] = lambda: False
) -> None:
    """Copy all files of `source` to new files in `target`. Logs take the place of those of a former dump.

    `progress` is called with further bytes, from any thread. Raises OSError, and Stopped soon after `stopped`
    has become true.
    """

    def copy(path: Path) -> None:
        reading = open_plain(path)
        try:
            with create_private(target / path.name, exclusive=path.name not in REWRITTEN) as writing:
                while count := os.sendfile(writing.fileno(), reading, None, CHUNK):
                    progress(count)
                    if stopped():
                        raise Stopped(f"{path}: not copied to its end")
        finally:
            os.close(reading)

    files: Sequence[Path] = sorted(source.iterdir(), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(THREADS, "write-out") as pool:
        list(pool.map(copy, files))
