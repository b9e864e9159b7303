"""What CRIU cannot dump, or would dump and never restore, found before anything is changed.

CRIU's own refusal comes with the container frozen, and names a number. Each kind has one function here, which says
which process holds what, and what can be done about it. The processes run meanwhile: what appears later, CRIU or the
proof refuses.

A watch of inotify(7) or fanotify(7) on overlay is not one: CRIU cannot find the file by its handle there, but by
its path, if it is told where to look.
Sources: CRIU's eventpoll.c, fsnotify.c, irmap.c, filesystems.c, seize.c, files-reg.c and compel/src/lib/infect.c of
versions 4.1 and 4.2; proc(5), /proc/PID/fdinfo.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.config import line
from kybernate_shim.checkpoint.descriptor_kinds import problem_of
from kybernate_shim.errors import Refused
from kybernate_shim.linux.descriptors import is_path, mount_in, mount_of_link, mounts_of
from kybernate_shim.linux.find_inodes import Identity, find_names, root_of
from kybernate_shim.linux.held_files import HeldFile, descriptors, held_files
from kybernate_shim.linux.kcmp import same_epoll_target
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.process import first_thread_has_ended, stranger_that_traces, title_of
from kybernate_shim.linux.statx import status_at, status_of

SHOWN: Final = 5
MOST_DESCRIPTORS: Final = 1 << 20  # of all processes together: each is looked at several times, and dumped by CRIU
FREE_DESCRIPTORS: Final = 8  # CRIU 4.2 has failed with 3
MOST_WATCHED: Final = 1 << 14  # files that are watched on overlay, of which CRIU is told each one's path
MOST_SECONDS: Final = 10.0  # for the epoll sets of a container, each of which may watch what each process may have open
MEMORY: Final = "/memfd:"
EPOLL: Final = "anon_inode:[eventpoll]"
WATCHERS: Final = {"anon_inode:inotify": "inotify", "anon_inode:[fanotify]": "fanotify"}
WATCH: Final = re.compile(r"^(?:inotify wd:\S+|fanotify) ino:([0-9a-f]+) sdev:([0-9a-f]+) ", re.MULTILINE)
LIMIT: Final = re.compile(r"^Max open files\s+(\d+)\s", re.MULTILINE)
POLICIES: Final = {6: "SCHED_DEADLINE", 7: "SCHED_EXT"}
FLAGS: Final = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
NO_PATH: Final = {stat.S_IFSOCK: "the socket", stat.S_IFIFO: "the FIFO"}
QUEUES: Final = "mqueue"  # a type of filesystem
WATCHED: Final = re.compile(r"^tfd:\s*(\d+) ", re.MULTILINE)


def not_dumpable(container: str, found: Looked) -> Refused:
    """Return the error: processes have something open that no checkpoint can bring back. Nothing was changed."""
    more = f"; and {found.more} more" if found.more else ""
    return Refused(
        f"container {container} cannot be checkpointed: {'; '.join(found.problems)}{more}. Nothing was changed"
    )


@dataclass
class Looked:
    """`problems` are the first sentences, `more` the number of the others, which can be a million; `lines` is what
    CRIU's configuration needs for what can be dumped.
    """

    problems: list[str] = field(default_factory=list)
    more: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, *problems: str) -> None:
        """Take sentences."""
        room = max(0, SHOWN - len(self.problems))
        self.problems += problems[:room]
        self.more += len(problems[room:])


def look(pids: Sequence[int]) -> Looked:
    """Return what the processes hold that CRIU cannot dump, or can if it is told more."""
    found = Looked()
    for problem in chain(_ended_leaders(pids), _full_tables(pids), _of_threads(pids), _waiting_messages(pids)):
        found.add(problem)
    visible = _Visible(pids)
    until = time.monotonic() + MOST_SECONDS
    watches: dict[Identity, HeldFile] = {}
    late: HeldFile | None = None
    for held in held_files(pids):
        with suppress(FileNotFoundError, ProcessLookupError):
            if held.what == "program" and held.path.startswith(MEMORY):
                found.add(_program(held))
            elif held.name == EPOLL and late is None:
                try:
                    for problem in _epoll(held, pids, until):
                        found.add(problem)
                except TimeoutError:
                    late = held
            elif held.name in WATCHERS:
                watches.update(dict.fromkeys(islice(_watches(held), MOST_WATCHED + 1 - len(watches)), held))
            elif problem := problem_of(held) or visible.problem_of(held):
                found.add(problem)
    if late is not None:
        found.add(
            f"what is watched by epoll could not be examined within {MOST_SECONDS:g} s, by {title_of(late.pid)} as its"
            f" {late.what} among others: remove what it need not watch"
        )
    if len(watches) > MOST_WATCHED:
        held = next(reversed(watches.values()))
        found.add(
            f"{title_of(held.pid)} and others watch more than {MOST_WATCHED} files of the root filesystem by"
            f" {WATCHERS[held.name]}, and CRIU needs a path for each: watch directories, or fewer of them"
        )
    elif watches:
        _find_watched(found, watches)
    return found


def require_few_descriptors(container: str, pids: Sequence[int]) -> None:
    """Raise Refused where the processes have more descriptors open than are looked at."""
    total, largest = 0, (0, 0)
    for pid in pids:
        with suppress(OSError):  # it has ended
            count = descriptors(pid, most=MOST_DESCRIPTORS + 1)
            total, largest = total + count, max(largest, (count, pid))
        if total > MOST_DESCRIPTORS:
            raise not_dumpable(
                container,
                Looked(
                    [
                        f"its processes have more than {MOST_DESCRIPTORS} descriptors open, {title_of(largest[1])}"
                        f" alone {largest[0]}: close those that are not needed, and look for a leak"
                    ]
                ),
            )


def _ended_leaders(pids: Sequence[int]) -> Iterator[str]:
    """Yield the processes whose first thread has ended while others run."""
    for pid in pids:
        if first_thread_has_ended(pid):
            yield (
                f"the first thread of {title_of(pid)} has ended (pthread_exit) while others run, which CRIU cannot"
                " dump: let it wait for them (pthread_join)"
            )


def _full_tables(pids: Sequence[int]) -> Iterator[str]:
    """Yield the processes that could open nothing more: CRIU has them open files of /proc, memory and sockets."""
    for pid in pids:
        with suppress(OSError, TypeError):  # it has ended, or has no limit
            limit = int(LIMIT.search(text_of(f"/proc/{pid}/limits"))[1])  # type: ignore[index]
            if descriptors(pid, most=limit) < limit - FREE_DESCRIPTORS:
                continue
            free = limit - sum(int(name) < limit for name in os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
            if free < FREE_DESCRIPTORS:
                yield (
                    f"{title_of(pid)} has {free} descriptors left of its {limit} (RLIMIT_NOFILE), and CRIU needs"
                    f" {FREE_DESCRIPTORS} there for a moment: close some, or raise the limit (ulimit -n)"
                )


def _of_threads(pids: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each process with a thread that another one traces, or that CRIU cannot schedule again."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # thousands of threads
                if tracer := stranger_that_traces(int(task)):
                    yield (
                        f"{title_of(pid)} is traced by {title_of(tracer)} (ptrace(2)), so that CRIU cannot"
                        " seize it: end the debugger or tracer before the checkpoint"
                    )
                    break
                if policy := POLICIES.get(os.sched_getscheduler(int(task))):
                    yield (
                        f"thread {task} of {title_of(pid)} has the scheduling policy {policy}, which CRIU cannot"
                        " restore: let it use another one, such as SCHED_FIFO or SCHED_OTHER"
                    )
                    break


def _waiting_messages(pids: Sequence[int]) -> Iterator[str]:
    """Yield a sentence on the POSIX message queues that a container sees, which CRIU leaves out."""
    for pid in pids[:1]:
        with suppress(OSError):  # also of a process whose first thread has ended, which shows no mounts
            for mount in read_mountinfo(pid):
                if mount.type != QUEUES:
                    continue
                with root_of(pid, str(mount.path)) as directory:
                    found = status_at(directory).st_dev
                    if f"{os.major(found)}:{os.minor(found)}" != mount.device:
                        continue  # something else is mounted over it
                    names = sorted(os.listdir(directory))  # noqa: PTH208  # by its descriptor
                if names:
                    shown = ", ".join(f"{name!a}" for name in names[:SHOWN])
                    yield (
                        f"the container of {title_of(pid)} has {len(names)} POSIX message queues at {mount.path}"
                        f" ({shown}), which CRIU cannot dump: remove them (mq_unlink(3)) before the checkpoint, or use"
                        " pipes or sockets"
                    )
                    return


class _Visible:
    """Which mounts the processes can see. CRIU looks up each open file by its mount."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._mounts = self._read()

    def problem_of(self, held: HeldFile) -> str:
        """Return a sentence about a file that is on no mount of theirs, "" where it is on one. Raises OSError."""
        if not is_path(held.name):
            return ""
        if "/fd/" not in held.place:
            return self._unseen(held, mount_of_link(held.place))
        info = _fdinfo(held)
        if _flags(info) & os.O_PATH and (kind := NO_PATH.get(stat.S_IFMT(status_of(held.place).st_mode))):
            return f"{held}, {kind} by O_PATH, which CRIU cannot dump: close it before the checkpoint"
        return self._unseen(held, mount_in(info))

    def _unseen(self, held: HeldFile, number: int) -> str:
        if number in self._mounts:
            return ""
        self._mounts = self._read()  # it may have been mounted meanwhile
        if number in self._mounts:
            return ""
        return (
            f"{held}, which lies on no mount that the container sees, such as a POSIX message queue, a filesystem that"
            " was unmounted (umount -l), or one of another container: CRIU cannot dump it; close it before the"
            " checkpoint"
        )

    def _read(self) -> frozenset[int]:
        found: set[int] = set()
        for pid in self._pids:
            with suppress(OSError):  # it has ended, or its first thread
                found.update(mounts_of(pid))
        return frozenset(found)


def _flags(info: str) -> int:
    found = FLAGS.search(info)
    return int(found[1], 8) if found else 0


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
            f"{title_of(held.pid)} watches, by its epoll {held.what}, an open file that was descriptor {watched} when"
            " it was added and that the process does not have open itself"
            f"{_other(held, pids, (number, watched, offset))}: CRIU cannot dump that. Remove it from the set"
            " (EPOLL_CTL_DEL) before it is closed, and make the set after fork(2)"
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
    """Yield what inotify or fanotify watches on overlay filesystems, where CRIU needs a path."""
    overlays: set[str] = set()
    for found in WATCH.finditer(_fdinfo(held)):
        inode, device = found.groups()
        overlays = overlays or {mount.device for mount in read_mountinfo(held.pid) if mount.type == "overlay"}
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
            found.add(f"a process watches {path!a}, and {error}")
    for identity in watches.keys() - names.keys():
        held = watches[identity]
        found.add(
            f"{title_of(held.pid)} watches, by its {WATCHERS[held.name]} {held.what}, a file of the root filesystem"
            f" whose name could not be found (inode {identity[1]}): CRIU needs one; remove the watch"
        )


def _fdinfo(held: HeldFile) -> str:
    return text_of(held.place.replace("/fd/", "/fdinfo/"))
