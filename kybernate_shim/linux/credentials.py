"""The privileges of processes: what they are made of, and how the kernel shows them in /proc.

Source: credentials(7), capabilities(7), proc(5).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from kybernate_shim.linux.cgroup.hierarchies import parse_names
from kybernate_shim.linux.kernel_text import lines_of, text_of

# By the names that OCI gives them; /proc's names are in `_FILES` where they differ.
NAMESPACES: Final = ("pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time")
_FILES: Final = {"network": "net", "mount": "mnt"}
CAPABILITIES: Final = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE"
    " NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN"
    " SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE"
    " MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
# The number of a limit is its place here.
LIMITS: Final = "CPU FSIZE DATA STACK CORE RSS NPROC NOFILE MEMLOCK AS LOCKS SIGPENDING MSGQUEUE NICE RTPRIO RTTIME"
REAL_TIME: Final = (1, 2, 6)  # first in first out, round robin, deadline
NO_LOGIN: Final = 0xFFFFFFFF
INFINITY: Final = 0xFFFFFFFFFFFFFFFF
SECCOMP_FILTER: Final = 2


@dataclass(frozen=True)
class Capabilities:
    """The five sets, each a number whose bits are the kernel's numbers of capabilities."""

    inheritable: int = 0
    permitted: int = 0
    effective: int = 0
    bounding: int = 0
    ambient: int = 0


@dataclass(frozen=True)
class ProcessCredentials:
    """The privileges of one thread; every id as in the container.

    `uids` and `gids`: real, effective, saved, of the filesystem. `filters` are digests of the seccomp programs, the
    oldest first; where only their count is known they are "". `node_namespaces` are the kinds that it shares with the
    node; the maps of its user namespace are `inside outside count`, () in the node's. `stray_cgroup` is its cgroup
    where that is neither the container's nor below it. `limits` are the hard ones by number. `boost` is how far its
    nice value lies below 0, `real_time` whether the scheduler prefers it to ordinary threads.
    """

    pid: int
    tid: int
    name: str
    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...] = ()
    caps: Capabilities = field(default_factory=Capabilities)
    securebits: int = 0
    no_new_privs: bool = False
    seccomp: int = 0
    filters: tuple[str, ...] = ()
    label: str = ""
    node_namespaces: tuple[str, ...] = ()
    uid_map: tuple[str, ...] = ()
    gid_map: tuple[str, ...] = ()
    stray_cgroup: str = ""
    limits: tuple[int, ...] = ()
    login: int = NO_LOGIN
    boost: int = 0
    real_time: bool = False


@cache
def capability_bits() -> Mapping[str, int]:
    """Return the kernel's number of every capability by its name, CAP_CHOWN for example."""
    return {f"CAP_{name}": number for number, name in enumerate(CAPABILITIES.split())}


def of_process(pid: int, cgroups: Mapping[str, str]) -> tuple[ProcessCredentials, ...]:
    """Return the privileges of all threads of a process; those that have ended have none.

    The namespaces are those of the first thread. `cgroups` is the name of the container's cgroup by controller, in the
    form of /proc/PID/cgroup; in a hierarchy that is missing there, every cgroup is accepted. `securebits` and the
    content of seccomp's filters are not in /proc.
    Raises ProcessLookupError where the process ends meanwhile, and OSError.
    """
    place = Path(f"/proc/{pid}")
    try:
        if _read(f"{place}/stat").rpartition(")")[2].split()[0] in "ZX":
            return ()
        process = _process_facts(place)
        tids = sorted(int(task.name) for task in (place / "task").iterdir())
        threads = (_thread(f"{place}/task/{tid}", tid, process, cgroups) for tid in tids)
        return tuple(one for one in threads if one is not None)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"process {pid} ended while it was being examined") from error


def is_below(path: str, cgroup: str) -> bool:
    """Return whether a cgroup's path is that of `cgroup` or of one below it; one with `..` is nowhere."""
    return ".." not in path.split("/") and f"{path.rstrip('/')}/".startswith(f"{cgroup.rstrip('/')}/")


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants as the host numbers them; for processes that start no others."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


@dataclass(frozen=True)
class _ThreadGroup:
    """What all threads of a process have in common when CRIU restores them; later, they may differ by unshare(2)."""

    users: Sequence[tuple[int, int, int]]
    groups: Sequence[tuple[int, int, int]]
    node_namespaces: tuple[str, ...]
    has_labels: bool
    limits: tuple[int, ...]
    login: int


def _process_facts(place: Path) -> _ThreadGroup:
    return _ThreadGroup(
        users=_ranges(place / "uid_map"),
        groups=_ranges(place / "gid_map"),
        node_namespaces=tuple(kind for kind in NAMESPACES if _is_the_nodes(place, kind)),
        has_labels=_has_labels(),
        limits=_limits(place),
        login=login_of(place),
    )


def _thread(place: str, tid: int, process: _ThreadGroup, cgroups: Mapping[str, str]) -> ProcessCredentials | None:
    """Return the privileges of a thread, None for one that has ended and only waits to be reaped."""
    status = dict(line.split(":\t", 1) for line in lines_of(text_of(f"{place}/status")) if ":\t" in line)
    if status["State"][0] in "ZX":
        return None
    uids, gids, groups = (tuple(map(int, status[name].split())) for name in ("Uid", "Gid", "Groups"))
    users, own_users = process.users, "user" not in process.node_namespaces
    return ProcessCredentials(
        pid=int(status.get("NStgid", status["Tgid"]).split()[-1]),
        tid=int(status.get("NSpid", status["Pid"]).split()[-1]),
        name=status["Name"],
        uids=_inside(uids, users) if own_users else uids,
        gids=_inside(gids, process.groups) if own_users else gids,
        groups=_inside(groups, process.groups) if own_users else groups,
        caps=Capabilities(*(int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))),
        no_new_privs=int(status["NoNewPrivs"]) == 1,
        seccomp=int(status["Seccomp"]),
        filters=("",) * int(status.get("Seccomp_filters", "0")),
        label=_label(place) if process.has_labels else "",
        node_namespaces=process.node_namespaces,
        uid_map=tuple(" ".join(map(str, one)) for one in users) if own_users else (),
        gid_map=tuple(" ".join(map(str, one)) for one in process.groups) if own_users else (),
        stray_cgroup=_stray(parse_names(text_of(f"{place}/cgroup")), cgroups),
        limits=process.limits,
        login=process.login,
        boost=max(0, -os.getpriority(os.PRIO_PROCESS, tid)),
        real_time=os.sched_getscheduler(tid) in REAL_TIME,
    )


def effective_user(pid: int) -> int:
    """Return the effective user of a process, as it is called inside its user namespace. Raises OSError."""
    user = int(_read(f"/proc/{pid}/status").partition("\nUid:\t")[2].split()[1])
    return _inside((user,), _ranges(Path(f"/proc/{pid}/uid_map")))[0]


def _inside(ids: Iterable[int], ranges: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return ids as they are called inside the user namespace with these ranges; what is outside of them stays."""
    return tuple(
        next((first + one - outside for first, outside, count in ranges if outside <= one < outside + count), one)
        for one in ids
    )


def _ranges(path: Path) -> list[tuple[int, int, int]]:
    """Return the ranges of a user namespace: first id inside, first outside, count."""
    rows = (tuple(map(int, line.split())) for line in path.read_text().splitlines())
    return [(inside, outside, count) for inside, outside, count in rows]


def _is_the_nodes(place: Path, kind: str) -> bool:
    """Return whether a namespace is the one of this process; always true for a kind that the kernel does not have."""
    name = _FILES.get(kind, kind)
    own = _our_namespace(name)
    return own == "" or str((place / "ns" / name).readlink()) == own


def is_nodes_namespace(path: str, kind: str) -> bool:
    """Return whether the namespace at a path, as OCI names its kind, is the one of this process. Raises OSError."""
    return os.path.samestat(os.stat(path), os.stat(f"/proc/self/ns/{_FILES.get(kind, kind)}"))  # noqa: PTH116


@cache
def _our_namespace(name: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{name}").readlink())
    except FileNotFoundError:
        return ""


def _read(path: str) -> str:
    """Return the content of a file in /proc; for thousands of threads, without pathlib's overhead."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read().decode(errors="surrogateescape")


def _stray(found: Mapping[str, str], container: Mapping[str, str]) -> str:
    """Return the first cgroup that is not the container's nor below it, "" if there is none."""
    strays = (path for one, path in found.items() if one in container and not is_below(path, container[one]))
    return next(strays, "")


@cache
def _has_labels() -> bool:
    """Return whether a security module gives names to processes here."""
    try:
        _label("/proc/self")
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
            return False
        raise
    return True


def _label(place: str) -> str:
    """Return the name that the security module gives the thread, without AppArmor's mode; "" for no confinement."""
    text = _read(f"{place}/attr/current").rstrip("\0\n")
    return "" if text == "unconfined" else re.sub(r" \((enforce|complain|kill|prompt|mixed)\)$", "", text)


def _limits(place: Path) -> tuple[int, ...]:
    """Return the hard limits. The kernel writes them in the order of their numbers, each in columns of fixed widths.

    prlimit(2) would need CAP_SYS_RESOURCE.
    """
    hard = (line[47:67].strip() for line in (place / "limits").read_text().splitlines()[1:])
    return tuple(INFINITY if text == "unlimited" else int(text) for text in hard)


def login_of(place: Path) -> int:
    """Return the login user of a process, NO_LOGIN where none is set or the kernel does not audit."""
    try:
        return int((place / "loginuid").read_text())
    except FileNotFoundError:
        return NO_LOGIN if place.exists() else _gone(place)


def _gone(place: Path) -> int:
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(place))
