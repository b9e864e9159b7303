"""One restore at a time may put processes into a cgroup, and only into an empty one.

`ctr containers restore` gives the new container the configuration of the dumped one, with its cgroup, and a restore
that fails kills all that is in its cgroup. Where the dumped container still runs, or another restore of the same image,
those would be killed. So a restore takes out a lease of its cgroup first, and gets it only while the cgroup is empty.
The cleanup after a restore whose daemon was killed checks first which restore held the lease.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from kybernate_shim.checkpoint.cleanup import named, plain_path
from kybernate_shim.errors import Refused
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.locks import try_lock_file
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN

DIRECTORY = RUN / "restores"
MOMENT = 1.0  # seconds, in which a process that only reads a record has closed it


@contextmanager
def leased(cgroups_path: str, bundle: Path, directory: Path = DIRECTORY) -> Iterator[None]:
    """Hold a cgroup, named as in config.json, for the restore into `bundle` while the body runs. Raises Refused."""
    if not cgroups_path:
        yield
        return
    path = _record(cgroups_path, directory)
    with _locked(path) as record:
        if record is None:
            raise Refused(f"another restore into cgroup {cgroups_path} is in progress; nothing was changed")
        if pids := Cgroup(*named(cgroups_path)).processes():
            if not record.read():  # else it names the restore to clean up after, whose daemon was killed
                path.unlink()
            raise Refused(
                f"processes of another container are in cgroup {cgroups_path}, which this one's configuration names"
                f" ({', '.join(map(str, sorted(pids)[:5]))}): the checkpointed container, if it still runs, or an"
                " earlier restore that is still ending. End that first, or give this one a cgroup of its own; nothing"
                " was changed"
            )
        record.seek(0)
        record.truncate()  # left by a restore whose daemon was killed and which is not cleaned up yet
        record.write(str(bundle))
        record.flush()
        try:
            yield
        finally:
            forget(cgroups_path, directory)


@contextmanager
def inherited(cgroups_path: str, bundle: Path, directory: Path = DIRECTORY) -> Iterator[bool]:
    """Yield whether a restore into `bundle`, whose daemon is dead, was the last to hold the cgroup.

    If so, no other restore gets the cgroup while the body runs. The next call yields the same, until `forget`.
    """
    path = _record(cgroups_path, directory)
    if not cgroups_path or _read(path) != str(bundle):
        yield False
        return
    with _locked(path, seconds=MOMENT) as record:
        yield record is not None and record.read() == str(bundle)


def forget(cgroups_path: str, directory: Path = DIRECTORY) -> None:
    """Record that nothing is left of the restore that held the cgroup last, which `inherited` has found."""
    _record(cgroups_path, directory).unlink(missing_ok=True)


def _record(cgroups_path: str, directory: Path) -> Path:
    """Return the file that is locked while the lease is held, and names the holder.

    A cgroup's name may be too long for a file name.
    """
    return directory / hashlib.blake2b(os.fsencode(plain_path(cgroups_path)), digest_size=16).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


@contextmanager
def _locked(path: Path, *, seconds: float = 0) -> Iterator[TextIO | None]:
    """Open and lock a file, created if need be; None where it is still locked elsewhere after so many seconds."""
    make_directory(path.parent)
    lock = try_lock_file(path, seconds=seconds)
    if lock is None:
        yield None
        return
    with os.fdopen(lock, "r+") as file:
        yield file
