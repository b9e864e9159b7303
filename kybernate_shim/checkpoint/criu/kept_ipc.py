"""Segments, semaphores and queues of System V that the pod has already, on the way of an image into that pod.

They belong to the pod's IPC namespace, which CRIU dumps with each container, and makes again: of each object, by its
key and its id, a new one. So a container could be restored in a pod once: not when it starts again there, where the
objects still are, and not after another container of the pod whose image has them, too. As with files of volumes, what
the pod has stays as it is, and only what it has not is made. With one exception: CRIU attaches processes only to
segments that it has made, so one that no process of the pod is attached to is removed, and made again as in the image.

An object of the pod is the image's where key, id, owner, mode and size are the same; its creator is CRIU once it was
restored. CRIU refuses others of that key or id, in its words.
Source: CRIU's ipc_ns.c and images/ipc-shm.proto, ipc-sem.proto and ipc-msg.proto of versions 4.1 and 4.2; sysvipc(7),
/proc/sysvipc in proc(5).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

from google.protobuf.message import DecodeError

from kybernate_shim.errors import Damaged
from kybernate_shim.linux.credentials import is_nodes_namespace
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.libc import library
from kybernate_shim.linux.namespaces import CLONE_NEWIPC, in_namespace
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.oci.spec import Spec

SEGMENTS: Final = "shm"
IPC_RMID: Final = 0
HEAD: Final = 8  # bytes that begin each of CRIU's files
LONGEST: Final = 4096  # bytes of an entry
MOST_OBJECTS: Final = 1 << 16
MOST_MESSAGES: Final = 1 << 20
MOST_KEPT: Final = 64 << 20  # bytes of a file of which a part is left out
Object = tuple[int, ...]  # key, id, mode, user, group, size or number


@dataclass(frozen=True)
class _Kind:
    """One of the three kinds: the columns of its id, size and users in /proc/sysvipc, and its entries."""

    id: str
    size: str
    users: str
    entry: Any
    measure: Callable[[Any], int]


# A queue's number of messages is no property of it.
KINDS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {
        "shm": _Kind("shmid", "size", "nattch", criu.IpcSegment, lambda entry: int(entry.size)),
        "sem": _Kind("semid", "nsems", "", criu.IpcSemaphores, lambda entry: int(entry.count)),
        "msg": _Kind("msqid", "", "", criu.IpcQueue, lambda entry: 0),
    }
)


def without_kept(image: Path, spec: Spec) -> dict[str, bytes]:
    """Return those of CRIU's files of an image that list objects which the pod has, without them.

    Nothing where the IPC namespace is the node's, or the container's own. Raises Damaged and OSError.
    """
    files = _files(image, spec)
    if not files:
        return {}
    path = Path(spec.namespace_path("ipc") or "")
    there = in_namespace(path, CLONE_NEWIPC, lambda: {name: _objects_of(name) for name in files})
    found = {file.name: _rest(file, KINDS[name], there[name]) for name, file in files.items() if there[name]}
    return {name: content for name, content in found.items() if content is not None}


def remove_unused(image: Path, spec: Spec) -> None:
    """Remove the segments of the image that the pod has and that no process is attached to, for CRIU to make them.

    Raises Damaged and OSError.
    """
    file = _files(image, spec).get(SEGMENTS)
    if file is None:
        return

    def work() -> None:
        unused = _objects_of(SEGMENTS, used=False)
        for one in unused & _listed(file, KINDS[SEGMENTS]) if unused else ():
            library().shmctl(one[1], IPC_RMID, None)  # what is gone meanwhile is no error; CRIU says what stays

    in_namespace(Path(spec.namespace_path("ipc") or ""), CLONE_NEWIPC, work)


def _files(image: Path, spec: Spec) -> dict[str, Path]:
    """Return the files that list objects, by their kinds, where the IPC namespace is the pod's."""
    path = spec.namespace_path("ipc")
    if not path or is_nodes_namespace(path, "ipc"):
        return {}
    return {name: file for name in KINDS for file in image.glob(f"ipcns-{name}-*.img") if file.stat().st_size > HEAD}


def _objects_of(name: str, *, used: bool = True) -> frozenset[Object]:
    """Return the objects of this thread's namespace; of segments those that processes are attached to, or not."""
    kind = KINDS[name]
    head, *lines = text_of(f"/proc/sysvipc/{name}").split("\n")
    rows = [dict(zip(head.split(), line.split(), strict=False)) for line in lines if line]
    return frozenset(_object(row, kind) for row in rows if (not kind.users or row[kind.users] != "0") == used)


def _listed(path: Path, kind: _Kind) -> frozenset[Object]:
    with os.fdopen(open_plain(path), "rb") as stream:
        stream.seek(HEAD)
        return frozenset(one for one, _, _ in _parts(path, stream, kind, os.fstat(stream.fileno()).st_size))


def _object(row: Mapping[str, str], kind: _Kind) -> Object:
    owners = (int(row[name]) for name in ("uid", "gid"))
    size = int(row[kind.size]) if kind.size else 0
    return int(row["key"]) & 0xFFFFFFFF, int(row[kind.id]), int(row["perms"], 8) & 0o777, *owners, size


def _rest(path: Path, kind: _Kind, there: frozenset[Object]) -> bytes | None:
    """Return a file without the objects that are there, None where it has none of them."""
    with os.fdopen(open_plain(path), "rb") as stream:
        head, end = stream.read(HEAD), os.fstat(stream.fileno()).st_size
        parts = list(_parts(path, stream, kind, end))
        kept = [(begin, until) for one, begin, until in parts if one not in there]
        if len(kept) == len(parts):
            return None
        if sum(until - begin for begin, until in kept) > MOST_KEPT:
            return None  # CRIU says which object is in its way
        return b"".join([head, *(_between(stream, begin, until) for begin, until in kept)])


def _between(stream: BinaryIO, begin: int, until: int) -> bytes:
    stream.seek(begin)
    return stream.read(until - begin)


def _parts(path: Path, stream: BinaryIO, kind: _Kind, end: int) -> Iterator[tuple[Object, int, int]]:
    """Yield each object with the places where it begins and ends in the file."""
    for _ in range(MOST_OBJECTS):
        begin = stream.tell()
        if begin == end:
            return
        entry = _entry(path, stream, kind.entry)
        if isinstance(entry, criu.IpcQueue):
            for _ in range(min(entry.count, MOST_MESSAGES)):
                _skip(stream, _entry(path, stream, criu.IpcMessage).size, 8)
        elif isinstance(entry, criu.IpcSemaphores):
            _skip(stream, 2 * entry.count, 8)
        elif not entry.in_pagemaps:
            _skip(stream, entry.size, 4)
        if stream.tell() > end:
            break
        one = entry.description
        yield (one.key, one.id, one.mode & 0o777, one.user, one.group, kind.measure(entry)), begin, stream.tell()
    raise Damaged(f"{path}: not whole, or more than {MOST_OBJECTS} objects")


def _entry(path: Path, stream: BinaryIO, kind: Any) -> Any:
    head = stream.read(4)
    length = struct.unpack("<I", head)[0] if len(head) == 4 else LONGEST + 1
    data = stream.read(length) if length <= LONGEST else b""
    if length > LONGEST or len(data) < length:
        raise Damaged(f"{path}: ends in the middle of an entry")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Damaged(f"{path}: an entry cannot be read") from error


def _skip(stream: BinaryIO, size: int, unit: int) -> None:
    stream.seek((size + unit - 1) // unit * unit, os.SEEK_CUR)
