"""Reads the privileges of an image's processes out of CRIU's files: what a restore would give them.

CRIU takes them from there alone, whatever the new container's config.json says. Every thread has its own.
Source: CRIU's images/core.proto, creds.proto, seccomp.proto, cgroup.proto, userns.proto of versions 4.1 and 4.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf.message import Message

from kybernate_shim.checkpoint.criu.images import CORE, FILES, IDS, INTERNET_SOCKET, INVENTORY, PSTREE, entries
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.credentials import NAMESPACES, NO_LOGIN, REAL_TIME, Capabilities, ProcessCredentials, is_below
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.trust.credentials import NeedsCapability

SECCOMP: Final = 0x64413049
CGROUPS: Final = 0x59383330
USER_NAMESPACE: Final = 0x55474906
DEAD: Final = 2  # a process that its parent has not waited for yet; it runs no more
RAW: Final = 3
SYNCHRONIZE: Final = 1  # SECCOMP_FILTER_FLAG_TSYNC
MOST_THREADS: Final = 65_536
MOST_FILTERS: Final = 1024  # of one thread; the kernel's limit on their instructions allows fewer

PACKET: Final = NeedsCapability("a packet socket", ("CAP_NET_RAW",))
RAW_SOCKET: Final = NeedsCapability("a raw socket", ("CAP_NET_RAW",))
# By CRIU's number of the kind of an open file.
KINDS: Final = {
    10: PACKET,
    12: NeedsCapability("an fanotify group", ("CAP_SYS_ADMIN",)),
    15: NeedsCapability("a network tunnel", ("CAP_NET_ADMIN",)),
    19: NeedsCapability("a BPF map", ("CAP_BPF", "CAP_SYS_ADMIN")),
}
POLICIES: Final = NeedsCapability("an AppArmor policy", ("CAP_MAC_ADMIN",))

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class _Image:
    """What the files of single threads refer to. `roots` are the container's own cgroups by controller."""

    directory: Path
    node: criu.Kernel
    filters: Sequence[bytes]
    order: Sequence[int | None]
    flags: Sequence[int]
    cgroups: Mapping[int, Mapping[str, str]]
    roots: Mapping[str, str]
    nodes_cgroups: int | None


def credentials(directory: Path) -> tuple[ProcessCredentials, ...]:
    """Return the privileges of every thread in the images, the first one of each process first.

    Dead processes are left out. Raises Damaged for files that CRIU would not have written.
    """
    image = None
    found: list[ProcessCredentials] = []
    for process in entries(directory / "pstree.img", PSTREE, criu.Process):
        first = _core(directory, process.pid)
        if first.task.state == DEAD:
            continue
        image = image or _image(directory, first)
        if process.pid not in process.threads or len(found) + len(process.threads) > MOST_THREADS:
            raise Damaged(f"{directory / 'pstree.img'}: process {process.pid} has {len(process.threads)} threads")
        found += _process(image, process, first)
    if not found:
        raise Damaged(f"{directory / 'pstree.img'}: no living process")
    return tuple(found)


def held(directory: Path) -> tuple[NeedsCapability, ...]:
    """Return what is open or loaded in the images that takes a capability to make. Raises Damaged."""
    found = []
    for entry in entries(directory / "files.img", FILES, criu.File):
        if entry.type == INTERNET_SOCKET and entry.internet.type == RAW:
            found.append(RAW_SOCKET)
        elif entry.type in KINDS:
            found.append(KINDS[entry.type])
    if (directory / "apparmor.img").exists():
        found.append(POLICIES)
    return tuple(dict.fromkeys(found))


def _process(image: _Image, process: criu.Process, first: criu.Core) -> list[ProcessCredentials]:
    kernel = _one(entries(image.directory / f"ids-{process.pid}.img", IDS, criu.Kernel), f"ids-{process.pid}.img")
    shared = _shared(kernel, image.node)
    maps = _maps(image.directory, kernel, shared)
    threads = sorted(set(process.threads), key=lambda tid: (tid != process.pid, tid))
    cores = ((tid, first if tid == process.pid else _core(image.directory, tid)) for tid in threads)
    found = [_thread(image, process.pid, tid, core.thread, first.task, shared, maps) for tid, core in cores]
    if not _synchronized(image, first.thread):
        return found
    mode, filters = found[0].seccomp, found[0].filters
    return [replace(one, seccomp=mode, filters=filters) if one.seccomp == 0 else one for one in found]


def _synchronized(image: _Image, first: criu.Thread) -> bool:
    """Return whether the kernel will give a process's filters to all of its threads.

    CRIU notes the filters of the first thread alone, with the flag that asks for this, where all threads had the same.
    """
    places = _row(image, first)
    return bool(places) and all(image.flags[place] & SYNCHRONIZE for place in places)


def _thread(
    image: _Image,
    pid: int,
    tid: int,
    thread: criu.Thread,
    task: criu.Task,
    shared: tuple[str, ...],
    maps: tuple[tuple[str, ...], tuple[str, ...]],
) -> ProcessCredentials:
    if not thread.HasField("creds"):
        raise Damaged(f"{image.directory / f'core-{tid}.img'}: no credentials")
    creds = thread.creds
    return ProcessCredentials(
        pid=pid,
        tid=tid,
        name=task.name,
        uids=(creds.uid, creds.euid, creds.suid, creds.fsuid),
        gids=(creds.gid, creds.egid, creds.sgid, creds.fsgid),
        groups=tuple(creds.groups),
        caps=_capabilities(creds),
        securebits=creds.securebits,
        no_new_privs=creds.no_new_privs == 1,
        seccomp=thread.seccomp_mode,
        filters=_filters(image, thread),
        label=creds.lsm_profile,
        node_namespaces=shared,
        uid_map=maps[0],
        gid_map=maps[1],
        stray_cgroup=_stray(image, thread),
        limits=tuple(limit.hard for limit in task.limits.limits),
        login=task.login if task.HasField("login") else NO_LOGIN,
        boost=max(0, -thread.nice),
        real_time=thread.policy in REAL_TIME,
    )


def _core(directory: Path, tid: int) -> criu.Core:
    return _one(entries(directory / f"core-{tid}.img", CORE, criu.Core), f"core-{tid}.img")


def _image(directory: Path, init: criu.Core) -> _Image:
    inventory = _one(entries(directory / "inventory.img", INVENTORY, criu.Inventory, service=None), "inventory.img")
    sets = _cgroups(directory)
    programs = _optional(directory / "seccomp.img", SECCOMP, criu.Seccomp)
    filters = programs.filters if programs is not None else ()
    own = init.thread.cgroup_set if init.thread.HasField("cgroup_set") else 0
    return _Image(
        directory=directory,
        node=inventory.node,
        filters=[one.program for one in filters],
        order=[one.previous if one.HasField("previous") else None for one in filters],
        flags=[one.flags for one in filters],
        cgroups=sets,
        roots=sets.get(own, {}),
        nodes_cgroups=inventory.node_cgroups if inventory.HasField("node_cgroups") else None,
    )


def _capabilities(creds: criu.Creds) -> Capabilities:
    sets = (creds.inheritable, creds.permitted, creds.effective, creds.bounding, creds.ambient)
    return Capabilities(*(sum(word << 32 * place for place, word in enumerate(words)) for words in sets))


def _filters(image: _Image, thread: criu.Thread) -> tuple[str, ...]:
    return tuple(f"sha256:{hashlib.sha256(image.filters[place]).hexdigest()}" for place in _row(image, thread))


def _row(image: _Image, thread: criu.Thread) -> list[int]:
    """Return the positions of a thread's own filters in seccomp.img, in the order in which CRIU installs them."""
    found: list[int] = []
    place = thread.seccomp_filter if thread.HasField("seccomp_filter") else None
    while place is not None:
        if place >= len(image.filters) or len(found) == MOST_FILTERS:
            raise Damaged(f"{image.directory / 'seccomp.img'}: no filter {place} in a chain of {len(found)}")
        found.append(place)
        place = image.order[place]
    return found


def _shared(kernel: criu.Kernel, node: criu.Kernel) -> tuple[str, ...]:
    """Return the kinds of namespaces that were CRIU's own at the dump; a kind without a number was the node's, too."""
    return tuple(kind for kind in NAMESPACES if getattr(kernel, kind) in (0, getattr(node, kind)))


def _maps(directory: Path, kernel: criu.Kernel, shared: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if "user" in shared:
        return (), ()
    name = f"userns-{kernel.user}.img"
    found = _one(entries(directory / name, USER_NAMESPACE, criu.UserNamespace), name)
    users, groups = (
        tuple(f"{one.inside} {one.outside} {one.count}" for one in ranges) for ranges in (found.users, found.groups)
    )
    return users, groups


def _cgroups(directory: Path) -> dict[int, dict[str, str]]:
    found = _optional(directory / "cgroup.img", CGROUPS, criu.Cgroups)
    return {one.id: {each.controller: each.path for each in one.members} for one in found.sets} if found else {}


def _stray(image: _Image, thread: criu.Thread) -> str:
    """Return a cgroup of the thread's that is neither the first process's nor below it, "" if there is none.

    CRIU moves the first one, and what is below it, to the new container's; anything else it would make where it was.
    """
    if not thread.HasField("cgroup_set"):
        return ""  # CRIU leaves it where the runtime has put it
    members = image.cgroups.get(thread.cgroup_set)
    if members is None or thread.cgroup_set == image.nodes_cgroups:
        return "of the programs that made the image"
    strays = (path for one, path in members.items() if one not in image.roots or not is_below(path, image.roots[one]))
    return next(strays, "")


def _one(found: Iterator[M], name: str) -> M:
    message = next(found, None)
    if message is None:
        raise Damaged(f"{name}: empty")
    return message


def _optional(path: Path, magic: int, kind: type[M]) -> M | None:
    return next(entries(path, magic, kind), None) if path.exists() else None
