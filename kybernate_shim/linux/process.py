"""Facts about a process by its pid, from /proc. Source: proc(5).

Every function but `title_of`, `name_of` and `has_ended` raises ProcessLookupError when there is no such process (any
more).
A daemon reads /proc by hand: psutil would add 0.9 MiB to each one. It provides neither flags, cgroups or roots of
processes, nor a start time in the kernel's ticks, which the arena's notes hold. Programs of their own use it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from kybernate_shim.linux.kernel_text import text_of

PF_EXITING = 0x4
MOST_SECONDS = 1.0  # of a search for an error's words; a container is deleted meanwhile, for which there are 5 s
MOST_NAMED = 20


def is_nodes_own(pid: int) -> bool:
    """Return whether a process is one of root's on this node, so that its name and its command line can be trusted.

    Any user, and any container that shares the node's pids, may name a process of its own like another one's program,
    and have its command line in memory that blocks a reader. A container's process has another mount namespace, in
    which its paths mean other files. A caller that is not root sees no namespaces, and decides by the user alone. False
    where the process is gone.
    """
    try:
        return privileged(pid) and all(_shares(pid, kind) for kind in ("pid", "mnt", "user"))
    except OSError:
        return False


def _shares(pid: int, namespace: str) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/{namespace}").samefile(f"/proc/self/ns/{namespace}")
    except PermissionError:
        if os.geteuid() == 0:
            raise
        return True


def privileged(pid: int) -> bool:
    """Return whether each of the user ids of a process is root's. Raises OSError where it is gone."""
    status = text_of(f"/proc/{pid}/status")
    return set(status.partition("\nUid:")[2].partition("\n")[0].split()) == {"0"}


def stranger_that_traces(tid: int) -> int | None:
    """Return which process traces a thread, None where none does or one of root's on this node, which lets go in time.

    Raises OSError where the thread is gone.
    """
    tracer = tracer_of(tid)
    return tracer if tracer and not is_nodes_own(tracer) else None


def tracer_of(tid: int) -> int:
    """Return which process traces a thread, 0 where none does. Raises OSError where the thread is gone."""
    return int(text_of(f"/proc/{tid}/status").partition("\nTracerPid:")[2].partition("\n")[0])


def parent_of(pid: int) -> int:
    """Return the parent's pid, 0 when it is outside our pid namespace."""
    return int(_stat(pid)[1])


def tree_below(root: int, pids: Iterable[int]) -> list[int]:
    """Return `root`, and those of the processes that descend from it; those that end meanwhile may be left out."""
    known = {root: True, 0: False}

    def descends(pid: int) -> bool:
        line = []
        while pid not in known:
            line.append(pid)
            known[pid] = False  # reused pids could form a cycle
            try:
                pid = parent_of(pid)
            except ProcessLookupError:
                break
        known.update(dict.fromkeys(line, known[pid]))
        return known[pid]

    return [root, *(pid for pid in pids if pid != root and descends(pid))]


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since boot: with the pid, an identity that is never reused."""
    return int(_stat(pid)[19])


def comm_of(pid: int) -> str:
    """Return the name of its program, or the one that the program has set, unchanged: 15 bytes at most."""
    return _read(pid, "comm").removesuffix("\n")


def state_of(pid: int) -> str:
    """Return the state of its first thread as one letter, Z once that has ended. Raises ProcessLookupError."""
    return _stat(pid)[0]


def is_exiting(pid: int) -> bool:
    """Return whether the process is exiting or a zombie: it has released its cgroups and memory then."""
    fields = _stat(pid)
    return fields[0] in ("Z", "X") or bool(int(fields[6]) & PF_EXITING)


def first_thread_has_ended(pid: int) -> bool:
    """Return whether the process is a zombie that has threads; one that is gone has none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return state_of(pid) == "Z" and len(os.listdir(f"/proc/{pid}/task")) > 1  # noqa: PTH208
    return False


def has_ended(pid: int) -> bool:
    """Return whether the process is gone, or exiting; a zombie whose parent does not reap it counts as well."""
    try:
        return is_exiting(pid)
    except ProcessLookupError:
        return True


def oom_score_adj(pid: int) -> int:
    """Return how much sooner (to 1000) or later (to -1000) than others the kernel kills it when memory runs out."""
    return int(_read(pid, "oom_score_adj"))


def set_oom_score_adj(pid: int, score: int) -> None:
    """Set oom_score_adj. Raises PermissionError when lowering it without CAP_SYS_RESOURCE."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
    except OSError as error:
        raise _translated(error, pid) from None


def title_of(pid: int) -> str:
    """Return the name of its program and its pid, as in sh[17], as text; ?[17] where there is no such process."""
    return f"{name_of(pid)}[{pid}]"


def name_of(pid: int) -> str:
    """Return the name of its program for a text, "?" where there is no such process.

    A program gives itself any name: what could act on a terminal or a log becomes a question mark.
    """
    try:
        name = comm_of(pid)
    except ProcessLookupError:
        return "?"
    return "".join(mark if mark.isprintable() else "?" for mark in name)


def holders(path: Path) -> list[str]:
    """Name processes that have their root, working directory or an open file at `path` or below, for an error.

    Any container can have millions of descriptors: the search ends after MOST_SECONDS, and with MOST_NAMED.
    """
    until = time.monotonic() + MOST_SECONDS
    found = (title_of(pid) for pid in _all() if any(link.is_relative_to(path) for link in _links(pid, until)))
    return list(islice(found, MOST_NAMED))


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _links(pid: int, until: float) -> Iterator[Path]:
    """Yield where its root, its working directory and its descriptors lead, until a moment of the monotonic clock."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for name in chain((f"/proc/{pid}/root", f"/proc/{pid}/cwd"), (entry.path for entry in entries)):
                if time.monotonic() > until:
                    return
                with suppress(OSError):  # it ended, or closed the file, while we looked
                    yield Path(name).readlink()
    except OSError:
        return


def _stat(pid: int) -> list[str]:
    """Return the fields after the name, the state first: the name may hold spaces and parentheses."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    try:
        return text_of(f"/proc/{pid}/{name}")
    except OSError as error:
        raise _translated(error, pid) from None


def _translated(error: OSError, pid: int) -> OSError:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), f"pid {pid}")
    return error


def boot_id() -> str:
    """Return what identifies this boot of the node."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
