"""State of a container's processes and threads that CRIU would lose silently, or refuse only once they are frozen.

A thread usually has working directory, root, umask, descriptors and namespaces in common with its process. CRIU looks
at the process's first thread alone, and gives the others the same. Of namespaces below the container's own, CRIU knows
those of mounts; those of networks only where it dumps the container's network, too, which is the runtime's affair.
Sources: unshare(2), kcmp(2); CRIU's namespaces.c (CLONE_SUBNS), net.c and cr-dump.c of versions 4.1 and 4.2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from kybernate_shim.errors import Refused
from kybernate_shim.linux.kcmp import same_descriptors, same_directories
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.process import is_exiting, title_of

SHOWN: Final = 3
NESTED: Final = ("user", "pid", "pid_for_children", "net", "uts", "ipc", "cgroup", "time", "time_for_children")
OF_THREADS: Final = ("net", "mnt", "uts", "ipc", "cgroup", "pid_for_children", "time_for_children")


def namespace_nested(container: str, found: Sequence[str]) -> Refused:
    """Return why a process in a namespace of its own prevents a checkpoint: CRIU cannot dump it."""
    return Refused(
        f"{listed(found)}: CRIU dumps no nested namespaces other than mount namespaces. Switch off what makes them,"
        f" such as a browser's or a build tool's sandbox, or end the process; container {container} continues as before"
    )


def thread_state_not_saved(container: str, found: Sequence[str]) -> Refused:
    """Return why a thread with state of its own prevents a checkpoint: a restore would give it its process's."""
    return Refused(
        f"{listed(found)}: a restore would give the thread those of its process. End the thread, or have a process"
        f" do its work; use --force where the thread can run with these; container {container} continues as before"
    )


def nested_namespaces(pids: Iterable[int], init: int) -> list[str]:
    """Return a sentence for each process that is in another namespace than `init`, of a kind that CRIU refuses."""
    own = [_namespace(init, kind) for kind in NESTED]
    found = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            others = (_namespace(pid, kind) for kind in NESTED)
            kinds = [kind for kind, other, mine in zip(NESTED, others, own, strict=True) if other != mine]
            if kinds and not is_exiting(pid):
                found.append(f"{title_of(pid)} has a {_word(kinds[0])} namespace of its own")
    return found


def own_thread_state(pids: Iterable[int]) -> list[str]:
    """Return a sentence for each thread that does not share with its process all that CRIU regards as shared.

    And for each process with an execution domain (personality(2)), of which CRIU knows nothing.
    """
    found = []
    for pid in pids:
        found += [f"thread {tid} of {title_of(pid)} has {what} of its own" for tid, what in _apart(pid)]
        with suppress(FileNotFoundError, ProcessLookupError):
            if domain := int(text_of(f"/proc/{pid}/personality"), 16):
                found.append(f"the first thread of {title_of(pid)} has the execution domain {domain:#x} (setarch(8))")
    return found


def _apart(pid: int) -> Iterator[tuple[int, str]]:
    try:
        tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208  # thousands of threads
        own = [_namespace(pid, kind) for kind in OF_THREADS] if len(tids) > 1 else []
    except (FileNotFoundError, ProcessLookupError):
        return
    for tid in tids:
        if tid != pid:
            with suppress(FileNotFoundError, ProcessLookupError):
                yield from _differences(pid, tid, own)


def _differences(pid: int, tid: int, own: Sequence[str]) -> list[tuple[int, str]]:
    """Return what a thread does not share with its process; nothing where one of the two is exiting."""
    found = []
    if not same_directories(pid, tid):
        found.append("a working directory, root and umask")
    if not same_descriptors(pid, tid):
        found.append("a table of descriptors")
    others = zip(OF_THREADS, own, strict=True)
    found += [f"a {_word(kind)} namespace" for kind, mine in others if _namespace(tid, kind) != mine]
    return [(tid, what) for what in found] if found and not (is_exiting(pid) or is_exiting(tid)) else []


def _namespace(tid: int, kind: str) -> str:
    """Return what identifies a thread's namespace; on a kernel without that kind, "" for all."""
    try:
        return os.readlink(f"/proc/{tid}/ns/{kind}")  # noqa: PTH115  # thousands of threads
    except FileNotFoundError:
        if os.path.exists(f"/proc/{tid}"):  # noqa: PTH110
            return ""
        raise


def _word(kind: str) -> str:
    return {"net": "network", "mnt": "mount"}.get(kind, kind.removesuffix("_for_children"))


def listed(found: Sequence[str]) -> str:
    """Return the sentences as a text, the first ones where there are many."""
    more = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and there are {more} more" if more > 0 else "")
