"""Memory for the plain files of an image that is encrypted on the disk: a tmpfs for each operation, of root alone.

Its name says which process uses it. A daemon that is killed leaves its tmpfs behind; the next one and `delete` remove
what belongs to processes that have ended. Imports little, because `delete` has no time for more.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kybernate_shim.errors import NoRoom, Refused
from kybernate_shim.linux.cgroup.headroom import available_bytes
from kybernate_shim.linux.mount import host, syscalls
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.linux.process import start_time
from kybernate_shim.run_directory import RUN
from kybernate_shim.sizes import mib

ROOT: Final = RUN / "plain"
RESERVE: Final = 64 << 20
SWAPS: Final = Path("/proc/swaps")
FLAGS: Final = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
ATTEMPTS: Final = 10
Mount = Callable[[str, str, str, int, str], None]  # as syscalls.mount


@contextmanager
def memory_for_plaintext(name: str) -> Iterator[Path]:
    """Yield an empty directory in memory that only root can enter, and remove it with all that is in it.

    `name` says what it is for. It takes as many bytes as the node can spare; see `require_memory`. Blocks. Raises
    Refused and OSError.
    """
    with private_memory(ROOT, name) as directory:
        yield directory


@contextmanager
def private_memory(
    root: Path, name: str, *, size: int = 0, may_be_swapped: bool = False, for_shims: bool = False
) -> Iterator[Path]:
    """Do as `memory_for_plaintext`, below `root`; with `for_shims`, where those see it. Raises as that, and OSError.

    With a `size`, it takes no more bytes than those.
    """
    remove_stale(root)
    limit = size or max(available_bytes() - RESERVE, RESERVE)
    directory = _new_directory(root, f"{name}.{os.getpid()}.{start_time(os.getpid())}")
    try:
        _mount(host.mount if for_shims else syscalls.mount, directory, limit, may_be_swapped=may_be_swapped)
        yield directory
    finally:
        _remove(directory)


def require_memory(needed: int, purpose: str) -> None:
    """Raise NoRoom unless the node has `needed` bytes of memory to spare. `purpose` begins the error."""
    available = available_bytes()
    if available < needed + RESERVE:
        raise NoRoom(
            f"{purpose} needs about {mib(needed)} of free memory for its plain files and {mib(RESERVE)} to spare,"
            f" since the image is encrypted; {mib(available)} are available: nothing was changed"
        )


def remove_stale(root: Path | None = None) -> None:
    """Remove what processes have left that were killed; what another process removes concurrently is not an error."""
    with suppress(FileNotFoundError):
        for directory in (root or ROOT).iterdir():
            if not _is_in_use(directory.name) and not _is_claimed(directory):
                with suppress(OSError):
                    _remove(directory)


def _is_in_use(name: str) -> bool:
    """Return whether the process in a directory's name lives; a name of another form is not ours to remove."""
    try:
        pid, started = map(int, name.rsplit(".", 2)[1:])
        return start_time(pid) == started
    except ProcessLookupError:
        return False
    except ValueError:
        return True


def _is_claimed(directory: Path) -> bool:
    """Return whether a restore still reads the image that a process, which has ended, had brought here."""
    from kybernate_shim.checkpoint.image.manifest import ARRIVING  # little is left by killed processes

    return any(map(_is_locked, directory.glob(f"*/{ARRIVING}")))


def _is_locked(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _new_directory(root: Path, name: str) -> Path:
    for _ in range(ATTEMPTS):
        with suppress(FileNotFoundError):  # another operation has just ended, and removed the empty parent
            make_directory(root)
            (root / name).mkdir(mode=0o700)
            return root / name
    raise FileNotFoundError(f"{root / name}: cannot be created, its parent directory is removed repeatedly")


def _mount(mount: Mount, directory: Path, limit: int, *, may_be_swapped: bool) -> None:
    """Mount a tmpfs that is never swapped out; huge pages spare most of the page faults where the kernel has them."""
    options = f"mode=0700,size={limit}"
    for more in (",noswap,huge=within_size", ",noswap"):
        with suppress(OSError):
            mount("kybernate-plain", str(directory), "tmpfs", FLAGS, options + more)
            return
    if not may_be_swapped and (devices := _swap_devices()):
        raise Refused(
            f"this kernel (before Linux 6.4) could write plain files of an encrypted image to {', '.join(devices)}:"
            " turn off swap; nothing was changed"
        )
    mount("kybernate-plain", str(directory), "tmpfs", FLAGS, options)


def _swap_devices() -> list[str]:
    """Return where the kernel swaps to; what zram takes stays in memory."""
    names = [line.split()[0] for line in SWAPS.read_text().splitlines()[1:]]
    return [name for name in names if not name.startswith("/dev/zram")]


def _remove(directory: Path) -> None:
    """Remove the files, also for mount namespaces that have a copy of the mount, then mount and directory.

    A process may still map a file, for example VRAM that its driver is about to read: its pages go with the mapping.
    """
    mounted = any(mount.path == directory for mount in read_mountinfo())
    with suppress(FileNotFoundError):
        _empty(directory)
    if mounted:
        host.umount(str(directory))
    with suppress(FileNotFoundError):
        directory.rmdir()
    with suppress(OSError):
        directory.parent.rmdir()


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            _empty(path)
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
