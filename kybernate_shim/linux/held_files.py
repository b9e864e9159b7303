"""What processes hold open, and under which names: descriptors, directories, programs and mapped files.

Source: proc(5), /proc/PID/fd, /proc/PID/fdinfo, /proc/PID/maps and /proc/PID/map_files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kybernate_shim.linux.process import title_of

DELETED: Final = " (deleted)"
TOO_LONG: Final = "(a path of more than 4095 bytes)"  # which the kernel does not show
LINKS: Final = {"cwd": "working directory", "root": "root directory", "exe": "program"}


@dataclass(frozen=True)
class HeldFile:
    """A file that process `pid` holds as `what`, such as `descriptor 4`. `place` is its link in /proc, `name` what the
    link says, with the kernel's mark if the name was removed.
    """

    pid: int
    what: str
    place: str
    name: str

    @property
    def path(self) -> str:
        """The name without the kernel's mark."""
        return self.name.removesuffix(DELETED)

    @property
    def removed(self) -> bool:
        return self.name.endswith(DELETED)

    def __str__(self) -> str:
        return f"{title_of(self.pid)} has {self.path!a} open as its {self.what}"


def held_files(pids: Iterable[int], *, mapped: bool = False) -> Iterator[HeldFile]:
    """Yield what the processes hold open, and with `mapped` the mapped files whose names were removed.

    What is closed, or ends, meanwhile is left out.
    """
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  # a loop over thousands of descriptors
                yield from _held(pid, f"descriptor {fd}", f"/proc/{pid}/fd/{fd}")
            for link, what in LINKS.items():
                yield from _held(pid, what, f"/proc/{pid}/{link}")
            if mapped:
                yield from _mapped(pid)


def descriptors(pid: int, *, most: int) -> int:
    """Return how many descriptors a process has open, at least `most` where there are more. Raises OSError."""
    if found := os.stat(f"/proc/{pid}/fd").st_size:  # noqa: PTH116  # since Linux 6.2
        return found
    with os.scandir(f"/proc/{pid}/fd") as entries:
        return sum(1 for _ in islice(entries, most))


def programs(pids: Iterable[int]) -> Iterator[HeldFile]:
    """Yield which files the processes execute."""
    for pid in pids:
        yield from _held(pid, LINKS["exe"], f"/proc/{pid}/exe")


def _held(pid: int, what: str, place: str) -> Iterator[HeldFile]:
    try:
        name = os.readlink(place)  # noqa: PTH115
    except (FileNotFoundError, ProcessLookupError):
        return
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = TOO_LONG
    yield HeldFile(pid, what, place, name)


def _mapped(pid: int) -> Iterator[HeldFile]:
    with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
        for line in file:  # one at a time: there may be a million, of 4 KiB each
            if not line.endswith(b" (deleted)\n"):
                continue
            place, _, _, _, inode, *name = line.rstrip(b"\n").split(None, 5)
            if inode != b"0" and name:
                yield HeldFile(pid, "mapped file", f"/proc/{pid}/map_files/{place.decode()}", os.fsdecode(name[0]))
