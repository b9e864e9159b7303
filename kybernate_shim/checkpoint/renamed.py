"""Finds, while a container is frozen, the names that a restore needs and that CRIU's images do not have."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.checkpoint.bound_sockets import file_of, is_bound_again
from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.criu.opened import OpenedFiles, descriptors_of
from kybernate_shim.checkpoint.names import Name, Names
from kybernate_shim.checkpoint.proof import ImageEvidence
from kybernate_shim.checkpoint.sockets import Socket
from kybernate_shim.linux.find_inodes import Identity, find_names, look, real_path, root_of
from kybernate_shim.linux.held_files import DELETED, HeldFile, held_files
from kybernate_shim.linux.process import title_of
from kybernate_shim.linux.statx import FileStatus, status_of
from kybernate_shim.messages import criu_pb2 as criu


@dataclass
class Found:
    """The names, and sentences about those that are not to be found."""

    links: list[Name] = field(default_factory=list)
    sockets: list[Name] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def names(self) -> Names:
        return Names(tuple(self.links), tuple(self.sockets))


def find(
    evidence: ImageEvidence, sockets: Iterable[Socket], pids: Sequence[int], init: int, binds: Collection[str] = ()
) -> Found:
    """Return the names for a dump whose processes are frozen; `sockets` are theirs.

    `binds` are the destinations of config.json's bind mounts, in which alone a restore makes names.
    """
    found = Found()
    linked = [one for one in evidence.opened.remaps if one.kind == criu.Remap.LINKED]
    if linked:
        former = {place.path for one in linked if (place := evidence.opened.paths.get(one.file))}
        held = [one for one in held_files(pids, mapped=True) if one.removed and one.path in former]
        for remap in linked:
            _find_link(found, remap, evidence, held, binds)
    for socket in sockets:
        if is_bound_again(socket):
            _find_socket(found, socket, evidence, init)
    return found


def _find_link(
    found: Found, remap: criu.Remap, evidence: ImageEvidence, held: Sequence[HeldFile], binds: Collection[str]
) -> None:
    """Find another name of a file whose own name was removed, for the link that CRIU's images name."""
    former, link = evidence.opened.paths.get(remap.file), evidence.opened.paths.get(remap.target)
    if former is None or link is None:
        return  # the proof says so
    mount = evidence.mounts.get(former.mount)
    if mount is not None and not mount.key:
        return  # the content of this filesystem is in CRIU's images, with CRIU's link
    holders = _holders(evidence.directory, remap.file, [one for one in held if one.path == former.path])
    if len(holders) != 1:
        found.problems.append(f"{former.path!a} was removed, and {len(holders)} files that had this name are open")
        return
    ((identity, holder),) = holders.items()
    if mount is not None and mount.destination not in binds:
        found.problems.append(
            f"{holder}, which was removed while the file has another name, and lies in the mount at"
            f" {mount.destination!a}, which a hook or a recursive bind mount has made: a restore can make no name"
            " there; let the program close it"
        )
        return
    where = mount.destination if mount is not None else "/"
    near = map(str, Path(former.path.removeprefix(where).strip("/")).parents)
    with root_of(holder.pid, where) as top:
        other = find_names(top, {identity}, list(near)).get(identity)
    if other is None:
        found.problems.append(
            f"{holder}, which was removed while the file has another name; no other name was found in the filesystem"
            f" at {where}: give it one there, or let the program close it"
        )
    else:
        found.links.append(Name(link.path, str(Path(where, other)), where))


def _holders(directory: Path, number: int, held: Sequence[HeldFile]) -> dict[Identity, HeldFile]:
    """Return the held files that still have a name, each with a process: usually one, since names are unique."""
    files = {identity: one for one in held if (identity := _identity(one)) is not None}
    if len(files) < 2:
        return files
    numbers = {f"descriptor {fd}" for fd in descriptors_of(directory, number)}
    return {identity: one for one in held if one.what in numbers and (identity := _identity(one)) is not None}


def _identity(held: HeldFile) -> Identity | None:
    try:
        status = status_of(held.place)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if status.st_nlink else None


def _find_socket(found: Found, socket: Socket, evidence: ImageEvidence, init: int) -> None:
    """Find out whether a socket lies where CRIU will bind it."""
    try:
        path, _, status = file_of(socket)
    except OSError:
        return  # it was closed: a socket that is in flight has no holder
    bound = socket.local
    title = f"{title_of(socket.holder[0])} has the UNIX socket {bound!a} open as its descriptor {socket.holder[1]}"
    if path.endswith(DELETED):
        if status.st_nlink:
            found.problems.append(
                f"{title}; its name was removed while its file has another one, where CRIU does not bind it: rename"
                " sockets instead of linking them, or let the program bind it again"
            )
        return
    if not bound.startswith("/") or os.path.normpath(bound) == path:
        return
    with root_of(init) as top:
        bound = real_path(top, bound)  # CRIU follows links on the way as well, such as /var/run
    if bound == path:
        return
    title += f", which was renamed to {path!a}"
    if status.st_nlink > 1:
        found.problems.append(f"{title} and has {status.st_nlink} names: a restore can make one alone")
        return
    if problem := _obstacle(bound, evidence.opened, init):
        found.problems.append(f"{title}; {problem}")
        return
    above = (one for one in evidence.mounts.values() if Path(bound).is_relative_to(one.destination))
    mount = max(above, key=_depth, default=None)
    missing = _missing(bound, init)
    if missing and mount is not None and not mount.key:
        found.problems.append(f"{title}; the directory {missing!a}, in which CRIU would bind it, was removed")
        return
    found.sockets.append(Name(bound, path, mount.destination if mount is not None else "/", missing))


def _depth(mount: DumpedMount) -> int:
    return mount.destination.count("/")


def _obstacle(bound: str, opened: OpenedFiles, init: int) -> str:
    """Return why CRIU cannot bind a socket to that path for a moment, "" where it can."""
    if sum(one.path == bound for one in opened.sockets) > 1:
        return "another socket is bound to that path now, and a restore can bind only one of them there"
    with root_of(init) as top:
        status = look(top, bound)
    if status is not None and not _is_socket(status):
        return "another file has that name now, and a restore could not bind the socket there"
    return ""


def _is_socket(status: FileStatus) -> bool:
    return status.st_mode & 0o170000 == 0o140000


def _missing(bound: str, init: int) -> str:
    """Return the topmost directory on the way to a path that there is not any more, "" where all are there."""
    with root_of(init) as top:
        above = reversed(Path(bound).parents)
        return next((str(one) for one in above if str(one) != "/" and look(top, str(one)) is None), "")
