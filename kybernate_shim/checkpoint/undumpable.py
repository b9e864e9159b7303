"""What CRIU cannot dump, or would dump and never restore, found before anything is changed.

CRIU's own refusal comes with the container frozen, and names a number. Each kind has one function here, which says
which process holds what, and what can be done about it. The processes run meanwhile: what appears later, CRIU or the
proof refuses.

A watch of inotify(7) on overlay is no such case: CRIU cannot find the file by its handle there, but by its path, if it
is told where to look.
Sources: CRIU's eventpoll.c, fsnotify.c, irmap.c and files-reg.c of versions 4.1 and 4.2; proc(5), /proc/PID/fdinfo.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.config import line
from kybernate_shim.checkpoint.descriptor_kinds import problem_of
from kybernate_shim.errors import Refused
from kybernate_shim.linux.find_inodes import Identity, find_names, root_of
from kybernate_shim.linux.held_files import HeldFile, held_files
from kybernate_shim.linux.kcmp import same_epoll_target
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.process import state_of, title_of

SHOWN: Final = 5
MOST_SECONDS: Final = 10.0  # for the epoll sets of a container, each of which may watch what each process may have open
MEMORY: Final = "/memfd:"
EPOLL: Final = "anon_inode:[eventpoll]"
INOTIFY: Final = "anon_inode:inotify"
WATCH: Final = re.compile(r"^inotify wd:\S+ ino:([0-9a-f]+) sdev:([0-9a-f]+) ", re.MULTILINE)
WATCHED: Final = re.compile(r"^tfd:\s*(\d+) ", re.MULTILINE)


def not_dumpable(container: str, problems: Sequence[str]) -> Refused:
    """Return the error: processes have something open that no checkpoint can bring back. Nothing was changed."""
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return Refused(
        f"container {container} cannot be checkpointed: {'; '.join(problems[:SHOWN])}{more}. Nothing was changed"
    )


@dataclass
class Looked:
    """`problems` are sentences, `lines` what CRIU's configuration needs for what can be dumped."""

    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def look(pids: Sequence[int]) -> Looked:
    """Return what the processes hold that CRIU cannot dump, or can if it is told more."""
    found = Looked(list(_ended_leaders(pids)))
    until = time.monotonic() + MOST_SECONDS
    watches: dict[Identity, HeldFile] = {}
    late: HeldFile | None = None
    for held in held_files(pids):
        with suppress(FileNotFoundError, ProcessLookupError):
            if held.what == "program" and held.path.startswith(MEMORY):
                found.problems.append(_program(held))
            elif held.name == EPOLL and late is None:
                try:
                    found.problems += _epoll(held, pids, until)
                except TimeoutError:
                    late = held
            elif held.name == INOTIFY:
                watches.update(dict.fromkeys(_watches(held), held))
            elif problem := problem_of(held):
                found.problems.append(problem)
    if late is not None:
        found.problems.append(
            f"what is watched by epoll could not be examined within {MOST_SECONDS:g} s, by {title_of(late.pid)} as its"
            f" {late.what} among others: remove what it need not watch"
        )
    if watches:
        _find_watched(found, watches)
    return found


def _ended_leaders(pids: Sequence[int]) -> Iterator[str]:
    """Yield the processes whose first thread has ended while others run."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if state_of(pid) == "Z" and len(os.listdir(f"/proc/{pid}/task")) > 1:  # noqa: PTH208
                yield (
                    f"the first thread of {title_of(pid)} has ended (pthread_exit) while others run, which CRIU cannot"
                    " dump: let it wait for them (pthread_join)"
                )


def _program(held: HeldFile) -> str:
    return (
        f"{title_of(held.pid)} executes {held.path!a}, a file in memory (memfd_create), which CRIU cannot execute"
        " again: let it execute a file of a filesystem"
    )


def _epoll(held: HeldFile, pids: Sequence[int], until: float) -> Iterator[str]:
    """Yield what an epoll set watches that its process does not have open itself any more.

    Raises TimeoutError when it is not done `until` that moment of the monotonic clock: CRIU, which looks for a file by
    the same calls, would need as long with the container frozen.
    """
    number = int(held.what.removeprefix("descriptor "))
    watching = [int(text) for text in WATCHED.findall(_fdinfo(held))]
    own = [int(name) for name in os.listdir(f"/proc/{held.pid}/fd")]  # noqa: PTH208  # after it: none is too new
    known = frozenset(own)
    seen: dict[int, int] = {}
    for watched in watching:
        if time.monotonic() > until:
            raise TimeoutError
        offset = seen[watched] = seen.get(watched, -1) + 1
        first = [watched] if watched in known else []
        if any(same_epoll_target(held.pid, fd, held.pid, (number, watched, offset)) for fd in chain(first, own)):
            continue
        yield (
            f"{title_of(held.pid)} watches by its epoll {held.what} an open file that was descriptor {watched} when it"
            f" was added and that the process has not open itself{_other(held, pids, (number, watched, offset))}: CRIU"
            " cannot dump that. Remove it from the set (EPOLL_CTL_DEL) before it is closed, and make the set after"
            " fork(2)"
        )


def _other(held: HeldFile, pids: Sequence[int], slot: tuple[int, int, int]) -> str:
    """Say which other process has open what an epoll set watches."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                if pid != held.pid and same_epoll_target(pid, int(name), held.pid, slot):
                    return f", but {title_of(pid)} has, as its descriptor {name}"
    return ""


def _watches(held: HeldFile) -> Iterator[Identity]:
    """Yield what an inotify instance watches on overlay filesystems, where CRIU needs a path."""
    found = WATCH.findall(_fdinfo(held))
    if not found:
        return
    overlays = {mount.device for mount in read_mountinfo(held.pid) if mount.type == "overlay"}
    for inode, device in found:
        major, minor = int(device, 16) >> 20, int(device, 16) & 0xFFFFF
        if f"{major}:{minor}" in overlays:
            yield os.makedev(major, minor), int(inode, 16)


def _find_watched(found: Looked, watches: dict[Identity, HeldFile]) -> None:
    """Have CRIU look where the watched files are; all processes see one root filesystem."""
    pid = next(iter(watches.values())).pid
    with root_of(pid) as top:
        names = find_names(top, watches)
    deepest_first = sorted({str(Path("/", name)) for name in names.values()}, key=lambda path: -path.count("/"))
    for path in deepest_first:
        try:
            found.lines.append(line("irmap-scan-path", path))
        except Refused as error:
            found.problems.append(f"a process watches {path!a} by inotify, and {error}")
    for identity in watches.keys() - names.keys():
        held = watches[identity]
        found.problems.append(
            f"{title_of(held.pid)} watches by its inotify {held.what} a file of the root filesystem without a name that"
            f" could be found (inode {identity[1]}): CRIU needs one; remove the watch (inotify_rm_watch)"
        )


def _fdinfo(held: HeldFile) -> str:
    return text_of(held.place.replace("/fd/", "/fdinfo/"))
