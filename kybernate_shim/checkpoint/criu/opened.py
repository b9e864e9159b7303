"""Reads which files CRIU opens again for the processes of an image, and by which names.

Source: CRIU's images/fdinfo.proto, regfile.proto, sk-unix.proto, remap-file-path.proto, fs.proto and mm.proto, and how
files-reg.c and sk-unix.c of versions 4.1 and 4.2 use them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from socket import SOCK_DGRAM
from typing import Final

from google.protobuf.message import Message

from kybernate_shim.checkpoint.criu.images import COMMON, FILES, MOST_PROCESSES, DumpedMount, entries, pids
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.private_files import write_private
from kybernate_shim.messages import criu_pb2 as criu

REMAPS: Final = 0x59133954
DESCRIPTORS: Final = 0x56213732
GHOST: Final = 0x52583605
DIRECTORIES: Final = 0x51403912
MEMORY: Final = 0x57492820
REGULAR: Final = 1  # CRIU's numbers of kinds of open files
UNIX: Final = 5
ESTABLISHED: Final = 1
DIRECTORY: Final = 0o040000
KIND_OF_FILE: Final = 0o170000
REMAP_FILE: Final = "remap-fpath.img"
FILES_FILE: Final = "files.img"


@dataclass(frozen=True)
class OpenedPath:
    """A path that CRIU opens, or to which it binds a socket; `mount` is that of mountpoints-*.img, -1 for none."""

    path: str
    mount: int = -1


@dataclass(frozen=True)
class OpenedFiles:
    """What is open in an image. `paths` are by CRIU's number of the file, `remaps` in CRIU's order.

    `sockets` are the UNIX sockets that CRIU binds to a path, without those whose path was gone. `needed` says who needs
    which numbers to be those of a path. `unix`: there are UNIX sockets that are or were bound to a path.
    """

    paths: Mapping[int, OpenedPath]
    sockets: Sequence[OpenedPath]
    remaps: Sequence[criu.Remap]
    needed: Sequence[tuple[str, int]] = ()
    unix: bool = False


def opened(directory: Path) -> OpenedFiles:
    """Return what the images in `directory` have open. Raises Damaged."""
    paths: dict[int, OpenedPath] = {}
    sockets: list[OpenedPath] = []
    unix = False
    for entry in entries(directory / FILES_FILE, FILES, criu.File):
        if entry.type == REGULAR:
            regular = entry.regular
            paths[entry.id] = OpenedPath("/" + os.fsdecode(regular.name).lstrip("/"), _mount(regular))
        elif entry.type == UNIX:
            unix = unix or bool(entry.unix.name)
            sockets += _bound(entry.unix)
    return OpenedFiles(paths, sockets, tuple(remaps(directory)), tuple(_needed(directory)), unix)


def remaps(directory: Path) -> Iterator[criu.Remap]:
    """Yield where a restore finds the files whose names are gone, in CRIU's order. Raises Damaged."""
    path = directory / REMAP_FILE
    if path.exists():
        yield from entries(path, REMAPS, criu.Remap)


def descriptors_of(directory: Path, number: int) -> set[int]:
    """Return under which descriptors a file is open, of whatever processes. Raises Damaged."""
    tables = islice(directory.glob("fdinfo-*.img"), MOST_PROCESSES)
    found = (one for table in tables for one in entries(table, DESCRIPTORS, criu.Descriptor))
    return {one.number for one in found if one.file == number}


def ghost_file(directory: Path, number: int) -> Path:
    """Return the file with the content of a file that has no name."""
    return directory / f"ghost-file-{number:x}.img"


def ghost_mode(directory: Path, number: int) -> int:
    """Return the kind and the mode of a file that has no name. Raises Damaged."""
    path = ghost_file(directory, number)
    found = next(entries(path, GHOST, criu.Ghost, most_bytes=None), None)
    if found is None:
        raise Damaged(f"{path}: empty")
    return found.mode


def order_removals(directory: Path, found: OpenedFiles, exists: Callable[[str], bool]) -> None:
    """Let a restore remove all that it makes for deleted files, whose directories may be deleted, too.

    CRIU makes deleted files again for the moment of opening them, and removes them in the order of its image, where a
    directory comes before another one inside of it if that was found later: rmdir(2) fails then. And what it makes on
    the way to a deleted directory, it does not remove at all: so the directory gets a name in one that `exists`, or
    that is made as well. Raises Damaged and OSError.
    """
    ghosts = [one for one in found.remaps if one.kind == criu.Remap.GHOST and one.file in found.paths]
    made = {one.file: found.paths[one.file].path for one in ghosts if _is_directory(directory, one)}
    if not made:
        return
    names = {number: _reachable(number, path, set(made.values()), exists) for number, path in made.items()}
    if names != made:
        _rename(directory, names)
    depth = {one.file: names.get(one.file, found.paths[one.file].path).count("/") for one in ghosts}
    ordered = sorted(found.remaps, key=lambda one: -depth.get(one.file, 0))
    if ordered != list(found.remaps):
        write_entries(directory / REMAP_FILE, REMAPS, ordered)


def _reachable(number: int, path: str, made: Collection[str], exists: Callable[[str], bool]) -> str:
    """Return a name for a deleted directory: its own, or one in the nearest directory that there is, or will be."""
    above = Path(path).parent
    while str(above) != "/" and str(above) not in made and not exists(str(above)):
        above = above.parent
    if above == Path(path).parent:
        return path
    return str(above / f"{'.'.join(Path(path).relative_to(above).parts)}.{number:x}")


def _rename(directory: Path, names: Mapping[int, str]) -> None:
    found = list(entries(directory / FILES_FILE, FILES, criu.File))
    for entry in found:
        if entry.type == REGULAR and entry.id in names:
            entry.regular.name = os.fsencode(names[entry.id].lstrip("/"))
    write_entries(directory / FILES_FILE, FILES, found)


def _is_directory(directory: Path, remap: criu.Remap) -> bool:
    return ghost_mode(directory, remap.target) & KIND_OF_FILE == DIRECTORY


def forget_sizes(directory: Path, mounts: Iterable[DumpedMount]) -> None:
    """Let files grow between the dump and the restore that programs append to, on mounts that others write to as well.

    CRIU opens a file only with the size that it had, but for those that are open for appending alone. Where a program
    may read as well, its offset stays what it was. Raises Damaged and OSError.
    """
    shared = {mount.id for mount in mounts if mount.key}
    found = list(entries(directory / FILES_FILE, FILES, criu.File)) if shared else []
    changed = False
    for entry in found:
        if entry.type == REGULAR and entry.regular.flags & os.O_APPEND and _mount(entry.regular) in shared:
            changed = changed or entry.regular.HasField("size")
            entry.regular.ClearField("size")
    if changed:
        write_entries(directory / FILES_FILE, FILES, found)


def write_entries(path: Path, magic: int, messages: Iterable[Message]) -> None:
    """Write one of CRIU's files again, whole or not at all."""
    content = packed_entries(magic, messages)
    path.unlink(missing_ok=True)
    write_private(path, content)


def packed_entries(magic: int, messages: Iterable[Message]) -> bytes:
    """Return the content of one of CRIU's files."""
    parts = [struct.pack("<II", COMMON, magic)]
    for message in messages:
        data = message.SerializeToString()
        parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def _bound(socket: criu.UnixSocket) -> Iterator[OpenedPath]:
    """Yield the path to which CRIU binds a socket again, if it binds it to one that a program can see."""
    bound = socket.type == SOCK_DGRAM or socket.state != ESTABLISHED
    if bound and not socket.deleted and socket.name and not socket.name.startswith(b"\0"):
        name = os.fsdecode(socket.name.partition(b"\0")[0])
        yield OpenedPath(str(Path("/", os.fsdecode(socket.directory), name)), _mount(socket))


def _mount(entry: criu.RegularFile | criu.UnixSocket) -> int:
    return entry.mount if entry.HasField("mount") else -1


def _needed(directory: Path) -> Iterator[tuple[str, int]]:
    for pid in pids(directory)[:MOST_PROCESSES]:
        path = directory / f"mm-{pid}.img"
        if path.exists():  # of a process that has ended, there is none
            for memory in entries(path, MEMORY, criu.Memory, most=1):
                yield f"the program of process {pid}", memory.program
        path = directory / f"fs-{pid}.img"
        if path.exists():
            for places in entries(path, DIRECTORIES, criu.Directories, most=1):
                yield f"the working directory of process {pid}", places.working
                yield f"the root directory of process {pid}", places.root
