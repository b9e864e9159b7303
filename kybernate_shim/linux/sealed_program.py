"""One program that is executed from memory that no process can change.

runc and crun keep containers away from their file: for each create and exec they make a copy that cannot be written to,
and continue in that (CVE-2019-5736). They make none where they were executed from such memory already, which runc's
manual leaves to administrators. So one process makes a copy for all processes that it will fork.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN

NUMBER = 63  # the copy's descriptor in all of them, for one link; the table of descriptors need not grow for it
DIRECTORY = RUN / "programs"  # of links by the programs' names, which become those of the processes
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE  # runc 1.1 wants these alone
MFD_EXEC = 0x10  # of memfd_create(2), since Linux 6.3
ELF = b"\x7fELF"


class _Sealed(NamedTuple):
    path: str
    identity: tuple[int, ...]


_sealed: _Sealed | None = None


def seal(path: Path) -> None:
    """Have `path` be executed from memory, by this process and those that it forks. Raises OSError."""
    global _sealed  # as the descriptor is
    with path.open("rb") as file:
        if file.read(len(ELF)) != ELF:
            raise OSError(f"{path} is a script: its interpreter could not open it")
        identity = _identity(os.fstat(file.fileno()))
        writable = _memory(path.name)
        try:
            os.fchmod(writable, 0o755)
            while os.sendfile(writable, file.fileno(), os.fstat(writable).st_size, 1 << 30):
                pass
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, SEALS)
            copy = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)  # what is open for writing cannot be executed
    try:
        _link(path.name)
        os.dup2(copy, NUMBER, inheritable=False)
    finally:
        os.close(copy)
    _sealed = _Sealed(str(path), identity)


def descriptors() -> tuple[int, ...]:
    """Return what must stay open."""
    return (NUMBER,) if _sealed is not None else ()


def executable(path: str) -> str:
    """Return the path by which to execute the program `path`: its own where it is not sealed, or was replaced since."""
    if _sealed is None or path != _sealed.path or _identity(os.stat(path)) != _sealed.identity:  # noqa: PTH116
        return path
    return f"{DIRECTORY}/{os.path.basename(path)}"  # noqa: PTH119  # once for every command of a runtime


def forget() -> None:
    """Execute all programs from their files from now on."""
    global _sealed
    if _sealed is not None:
        _sealed = None
        os.close(NUMBER)


def _link(name: str) -> None:
    make_directory(DIRECTORY)  # runtimes are executed as root
    link = DIRECTORY / f".{name}-{os.getpid()}"
    link.symlink_to(f"/proc/self/fd/{NUMBER}")
    link.replace(DIRECTORY / name)


def _memory(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_EXEC)
    except OSError:
        return os.memfd_create(name, flags)  # older than the flag, which has been the default until then


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
