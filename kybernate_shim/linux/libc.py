"""System calls that Python does not wrap, each with its errno as an OSError that names what it was about.

Sources: the manual pages of the calls in section 2; numbers of the newer ones from the kernel's generic table, which
x86-64 and arm64 share.
"""

from __future__ import annotations

import errno
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SCHED_CORE = 62
SCHED_CORE_GET = 0
SCHED_CORE_CREATE = 1
SCHED_CORE_SHARE_FROM = 3
SCHED_CORE_SCOPE_THREAD = 0
SCHED_CORE_SCOPE_THREAD_GROUP = 1
PR_SET_MM = 35
PR_SET_MM_MAP = 14
M_ARENA_MAX = -8

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_REMOUNT = 32
MS_MANDLOCK = 64
MS_DIRSYNC = 128
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_MOVE = 8192
MS_REC = 16384
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MS_STRICTATIME = 1 << 24

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR_IDMAP = 0x100000
RESOLVE_NO_MAGICLINKS = 0x2
RESOLVE_NO_SYMLINKS = 0x4
RESOLVE_BENEATH = 0x8
RESOLVE_IN_ROOT = 0x10

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUSER = 0x10000000

IN_MODIFY = 2

_OPEN_TREE = 428
_MOVE_MOUNT = 429
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_OPENAT2 = 437
_PIDFD_GETFD = 438
_MOUNT_SETATTR = 442
_MBIND = {"x86_64": 237, "aarch64": 235}
_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE = 0
_KCMP_VM = 1
_KCMP_FILES = 2

_Argument = int | bytes | str | None


# -- The process ------------------------------------------------------------------------------------------------------


def prctl(option: int, *arguments: int) -> int:
    """Call prctl(2) with up to four arguments and return its result."""
    return _call("prctl", option, *arguments, *[0] * (4 - len(arguments)), subject=f"prctl {option}")


def become_subreaper() -> None:
    """Make this process the parent of every orphan below it, container inits among them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set what `ps` and /proc/<pid>/comm show for the calling thread; the kernel keeps the first 15 bytes."""
    _call("prctl", PR_SET_NAME, name.encode(), 0, 0, 0, subject=name)


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
    """Take the cookie of process `pid`, or have none like it."""
    prctl(PR_SCHED_CORE, SCHED_CORE_SHARE_FROM, pid, SCHED_CORE_SCOPE_THREAD, 0)


def set_command_line(words: list[str]) -> None:
    """Set what `ps` and /proc/<pid>/cmdline show, for a process that was forked and never executed anything.

    Raises OSError on kernels that were built without checkpoint support. Source: PR_SET_MM_MAP in prctl(2), whose
    addresses but for the two of the words stay what proc(5)'s `stat` tells.
    """
    import ctypes
    from struct import pack

    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    buffer = ctypes.create_string_buffer(text, len(text))
    begin = ctypes.addressof(buffer)
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123
        fields = ["", "", "", *stat.read().rpartition(")")[2].split()]  # numbered as in proc(5)
    code, stack, data, environment = fields[26:28], fields[28], fields[45:48], fields[50:52]
    _libc().sbrk.restype = ctypes.c_void_p
    addresses = (*code, *data, _libc().sbrk(0), stack, begin, begin + len(text), *environment)
    layout = pack("=11QQIi", *map(int, addresses), 0, 0, -1)
    raw = ctypes.create_string_buffer(layout, len(layout))
    prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.addressof(raw), len(layout), 0)
    _command_lines.append(buffer)  # the kernel reads it for as long as the process lives


_command_lines: list[object] = []


def use_one_heap() -> None:
    """Let all threads allocate from the same heap: each one of their own costs pages that never come back."""
    import ctypes

    _libc().mallopt(ctypes.c_int(M_ARENA_MAX), ctypes.c_int(1))


def pidfd_getfd(pid: int, fd: int) -> int:
    """Return a descriptor of ours for what `fd` is in process `pid`. See pidfd_getfd(2)."""
    process = os.pidfd_open(pid)
    try:
        return _syscall(_PIDFD_GETFD, process, fd, 0, subject=f"fd {fd} of process {pid}")
    finally:
        os.close(process)


def unshare(flags: int) -> None:
    """Leave the namespaces, or stop sharing the attributes, that `flags` (CLONE_*) names."""
    _call("unshare", flags, subject=f"unshare {flags:#x}")


def setns(fd: int, kind: int = 0) -> None:
    """Join the namespace that `fd` stands for; `kind` is its CLONE_NEW* flag, 0 for any."""
    _call("setns", fd, kind, subject=f"namespace fd {fd}")


# -- Memory -----------------------------------------------------------------------------------------------------------


def mbind(address: int, size: int, mode: int, nodes: bytes) -> None:
    """Set where pages of a mapping come from: `mode` is an MPOL_*, `nodes` a mask of them, the lowest byte first."""
    number, bits = _MBIND[os.uname().machine], len(nodes) * 8
    _syscall(number, address, size, mode, nodes, bits + 1, 0, subject=f"NUMA policy {mode}")


def same_memory(pid: int, other: int) -> bool:
    """Tell whether two processes have one address space, see kcmp(2). A machine without that call knows of none."""
    return _same(pid, other, _KCMP_VM)


def same_descriptors(pid: int, other: int) -> bool:
    """Tell whether two threads have one table of descriptors, see kcmp(2); else as `same_memory`."""
    return _same(pid, other, _KCMP_FILES)


def same_open_file(pid: int, other: int, fd: int) -> bool:
    """Tell whether descriptor `fd` of two processes is one open file, as after a fork(2); else as `same_memory`.

    Raises OSError (EBADF) where one of them has no such descriptor.
    """
    return _same(pid, other, _KCMP_FILE, fd)


def _same(pid: int, other: int, what: int, number: int = 0) -> bool:
    call = _KCMP.get(os.uname().machine)
    if call is None:
        return False
    try:
        return _syscall(call, pid, other, what, number, number, subject=f"pids {pid} and {other}") == 0
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return False
        raise


# -- Mounts, the old calls --------------------------------------------------------------------------------------------


def mount(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
    """Call mount(2). Raises OSError that names `target`; the kernel cuts `data` silently at a page's end."""
    _call("mount", source, target, fstype, flags, data or None, subject=target)


def umount(target: str, flags: int = 0) -> None:
    """Call umount2(2). Raises OSError that names `target`."""
    _call("umount2", target, flags, subject=target)


# -- Mounts, the calls by file descriptor -----------------------------------------------------------------------------


def open_tree(directory: int, path: str, flags: int) -> int:
    """Return a descriptor of the mount at `path`, of a detached copy with OPEN_TREE_CLONE."""
    return _syscall(_OPEN_TREE, directory, path, flags, subject=path)


def move_mount(source: int, source_path: str, target: int, target_path: str, flags: int) -> None:
    """Attach the mount at (`source`, `source_path`) to (`target`, `target_path`)."""
    _syscall(_MOVE_MOUNT, source, source_path, target, target_path, flags, subject=target_path)


def mount_setattr(directory: int, path: str, flags: int, *, attributes: int, userns: int = 0) -> None:
    """Set attributes (MOUNT_ATTR_*) of a mount; `userns` is a descriptor, for MOUNT_ATTR_IDMAP."""
    from struct import pack

    change = pack("=QQQQ", attributes, 0, 0, userns)  # set, clear, propagation, user namespace
    _syscall(_MOUNT_SETATTR, directory, path, flags, change, len(change), subject=path or f"fd {directory}")


def fsopen(fstype: str, flags: int = FSOPEN_CLOEXEC) -> int:
    """Return a descriptor of a new filesystem context of `fstype`; reading it gives the kernel's messages."""
    return _syscall(_FSOPEN, fstype, flags, subject=fstype)


def fsconfig(context: int, command: int, key: str | None = None, value: str | None = None) -> None:
    """Give a filesystem context one option, or a command; the kernel takes values of at most 255 bytes."""
    _syscall(_FSCONFIG, context, command, key, value, 0, subject=f"{key or 'create'}={value or ''}")


def fsmount(context: int, flags: int = FSMOUNT_CLOEXEC, attributes: int = 0) -> int:
    """Return a descriptor of a detached mount of the filesystem that the context has created."""
    return _syscall(_FSMOUNT, context, flags, attributes, subject=f"fd {context}")


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open `path` as a process would whose root directory is the descriptor `root`: no symlink leads out of it."""
    return openat2(root, path, flags, RESOLVE_IN_ROOT)


def openat2(directory: int, path: str, flags: int, resolve: int) -> int:
    """Open `path` below a directory, resolved by the rules of `resolve` (RESOLVE_*)."""
    from struct import pack

    how = pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return _syscall(_OPENAT2, directory, path, how, len(how), subject=path)


# -- Notices ----------------------------------------------------------------------------------------------------------


def inotify_watch(path: str, mask: int) -> int:
    """Return a non-blocking inotify descriptor that watches the one file `path`."""
    fd = _call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC, subject="inotify")
    try:
        _call("inotify_add_watch", fd, path, mask, subject=path)
    except OSError:
        os.close(fd)
        raise
    return fd


def timer_open() -> int:
    """Return a non-blocking descriptor of a monotonic timer that is not set."""
    clock_monotonic = 1
    return _call("timerfd_create", clock_monotonic, os.O_NONBLOCK | os.O_CLOEXEC, subject="timer")


def timer_set(fd: int, seconds: float) -> None:
    """Make the timer readable once, in `seconds`; 0 stops it."""
    from struct import pack

    whole = int(seconds)
    _call("timerfd_settime", fd, 0, pack("@llll", 0, 0, whole, int((seconds - whole) * 1e9)), None, subject="timer")


# -- ctypes -----------------------------------------------------------------------------------------------------------


@cache
def _libc() -> ctypes.CDLL:
    import ctypes  # here, because the programs that only look at a node never call libc

    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: _Argument, subject: str) -> int:
    return _call("syscall", number, *arguments, subject=subject)


def _call(function: str, *arguments: _Argument, subject: str) -> int:
    """Call a function of libc that returns -1 on failure.

    Numbers go as C longs (a variadic function sees whole registers), strings as NUL-terminated bytes.
    """
    import ctypes

    entry = getattr(_libc(), function)
    entry.restype = ctypes.c_long if function == "syscall" else ctypes.c_int
    result: int = entry(*[_as_c(argument) for argument in arguments])
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), subject)
    return result


def _as_c(argument: _Argument) -> ctypes.c_long | ctypes.c_char_p:
    import ctypes

    if isinstance(argument, int):
        return ctypes.c_long(argument)
    if isinstance(argument, str):
        argument = os.fsencode(argument)
        if b"\0" in argument:
            raise ValueError(f"NUL byte in {argument!r}")  # C would silently take the part before it
    return ctypes.c_char_p(argument)
