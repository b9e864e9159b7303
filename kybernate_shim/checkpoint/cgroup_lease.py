"""One restore at a time may put processes into a cgroup, and only into an empty one.

`ctr containers restore` gives the new container the configuration of the dumped one, with its cgroup, and a restore
that fails kills all that is in its cgroup. Where the dumped container still runs, or another restore of the same image,
those would be killed. So a restore takes out a lease of its cgroup first, and gets it only while nobody is in there;
and who clears away what a killed daemon has left of a restore asks first whose the lease was.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from kybernate_shim.checkpoint.remains import named, plain_path
from kybernate_shim.errors import Refused
from kybernate_shim.linux.cgroups import Cgroup
from kybernate_shim.linux.private import make_directory

DIRECTORY = Path("/run/kybernate/restores")
MOMENT = 1.0  # seconds, in which who only looks at a note has let go of it
POLL_SECONDS = 0.01


class CgroupTaken(Refused):
    """Somebody else's processes are in the cgroup that a restore was to use, or are about to be."""


@contextmanager
def leased(cgroups_path: str, bundle: Path, directory: Path = DIRECTORY) -> Iterator[None]:
    """Hold a cgroup, named as in config.json, for the restore into `bundle` while the body runs. Raises CgroupTaken."""
    if not cgroups_path:
        yield
        return
    path = _note(cgroups_path, directory)
    with _locked(path) as note:
        if note is None:
            raise CgroupTaken(f"another restore into cgroup {cgroups_path} is under way; nothing was changed")
        if pids := Cgroup(*named(cgroups_path)).processes():
            if not note.read():  # else it tells who is to clear away what a killed daemon has left
                path.unlink()
            raise CgroupTaken(
                f"processes of another container are in cgroup {cgroups_path}, which this one's configuration names"
                f" ({', '.join(map(str, sorted(pids)[:5]))}): the checkpointed container, if it still runs, or an"
                " earlier restore that is still ending. End that first, or give this one a cgroup of its own; nothing"
                " was changed"
            )
        note.truncate(0)  # of a restore whose daemon was killed, and that nobody has cleared away yet
        note.write(str(bundle))
        note.flush()
        try:
            yield
        finally:
            forget(cgroups_path, directory)


@contextmanager
def inherited(cgroups_path: str, bundle: Path, directory: Path = DIRECTORY) -> Iterator[bool]:
    """Tell whether a restore into `bundle`, whose daemon is dead, was the last to hold the cgroup.

    If so, nobody else gets it while the body runs, and the next who asks is told the same, until `forget`.
    """
    path = _note(cgroups_path, directory)
    if not cgroups_path or _read(path) != str(bundle):
        yield False
        return
    with _locked(path, seconds=MOMENT) as note:
        yield note is not None and note.read() == str(bundle)


def forget(cgroups_path: str, directory: Path = DIRECTORY) -> None:
    """Note that nothing is left of who held the cgroup last, as `inherited` has told."""
    _note(cgroups_path, directory).unlink(missing_ok=True)


def _note(cgroups_path: str, directory: Path) -> Path:
    """Return the file that is locked while somebody has the lease, and says who. A cgroup's name may be too long."""
    return directory / hashlib.blake2b(os.fsencode(plain_path(cgroups_path)), digest_size=16).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


@contextmanager
def _locked(path: Path, *, seconds: float = 0) -> Iterator[TextIO | None]:
    """Open and lock a file, which is made if need be; None while another has it, after so many seconds."""
    make_directory(path.parent)
    until = time.monotonic() + seconds
    while True:
        with path.open("a+") as file:
            if _lock(file, until):
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue  # its last holder has removed it since we opened it
                file.seek(0)
                yield file
            else:
                yield None
            return


def _lock(file: TextIO, until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_SECONDS)
