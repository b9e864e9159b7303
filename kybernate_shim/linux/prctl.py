"""prctl(2): what a process sets for itself: its name, its command line, its orphans, its core scheduling."""

from __future__ import annotations

from kybernate_shim.linux.libc import call, library

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_SCHED_CORE = 62
SCHED_CORE_GET = 0
SCHED_CORE_CREATE = 1
SCHED_CORE_SHARE_FROM = 3
SCHED_CORE_SCOPE_THREAD = 0
SCHED_CORE_SCOPE_THREAD_GROUP = 1
PR_SET_MM = 35
PR_SET_MM_MAP = 14
_command_lines: list[object] = []


def prctl(option: int, *arguments: int) -> int:
    """Call prctl(2) with up to four arguments and return its result."""
    return call("prctl", option, *arguments, *[0] * (4 - len(arguments)), subject=f"prctl {option}")


def become_subreaper() -> None:
    """Make this process the parent of every orphan below it, container inits among them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set what `ps` and /proc/<pid>/comm show for the calling thread; the kernel keeps the first 15 bytes."""
    call("prctl", PR_SET_NAME, name.encode(), 0, 0, 0, subject=name)


def new_core_scheduling_cookie() -> None:
    """Let no process but this one and its later children share a CPU core with it at the same time.

    Raises OSError on kernels without core scheduling. Source: the kernel's admin guide, "Core Scheduling".
    """
    prctl(PR_SCHED_CORE, SCHED_CORE_CREATE, 0, SCHED_CORE_SCOPE_THREAD_GROUP, 0)


def core_scheduling_cookie(pid: int) -> int:
    """Return the cookie of process `pid`, 0 for this one's; 0 also without one, and on kernels without cookies."""
    import ctypes

    cookie = ctypes.c_ulong(0)
    try:
        prctl(PR_SCHED_CORE, SCHED_CORE_GET, pid, SCHED_CORE_SCOPE_THREAD, ctypes.addressof(cookie))
    except OSError:
        return 0
    return cookie.value


def share_core_scheduling_cookie(pid: int) -> None:
    """Take over the cookie of process `pid`, or have none if it has none."""
    prctl(PR_SCHED_CORE, SCHED_CORE_SHARE_FROM, pid, SCHED_CORE_SCOPE_THREAD, 0)


def set_command_line(words: list[str]) -> None:
    """Set what `ps` and /proc/<pid>/cmdline show, for a process that was forked and never executed anything.

    Raises OSError on kernels that were built without checkpoint support. Source: PR_SET_MM_MAP in prctl(2), whose
    addresses but for the two of the words stay what proc(5)'s `stat` reports.
    """
    import ctypes
    from struct import pack

    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    buffer = ctypes.create_string_buffer(text, len(text))
    begin = ctypes.addressof(buffer)
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123
        fields = ["", "", "", *stat.read().rpartition(")")[2].split()]  # numbered as in proc(5)
    code, stack, data, environment = fields[26:28], fields[28], fields[45:48], fields[50:52]
    library().sbrk.restype = ctypes.c_void_p
    addresses = (*code, *data, library().sbrk(0), stack, begin, begin + len(text), *environment)
    layout = pack("=11QQIi", *map(int, addresses), 0, 0, -1)
    raw = ctypes.create_string_buffer(layout, len(layout))
    prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.addressof(raw), len(layout), 0)
    _command_lines.append(buffer)  # the kernel reads it for as long as the process lives
