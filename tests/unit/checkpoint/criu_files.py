"""CRIU's files of a container with a root filesystem, a tmpfs and a volume, as far as the proof reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import Message

from kybernate_shim.checkpoint.criu import images, opened
from kybernate_shim.checkpoint.criu.images import COMMON
from kybernate_shim.messages import criu_pb2 as criu

ROOT, PRIVATE, VOLUME = 1, 2, 3  # the ids of the mounts
OTHER_ROOT, SAME_ROOT = 11, 12  # of programs in mount namespaces of their own
PROGRAM = 100  # the number of what the one process executes


def write(path: Path, magic: int, messages: Iterable[Message]) -> None:
    parts = [struct.pack("<II", COMMON, magic)]
    for message in messages:
        data = message.SerializeToString()
        parts += [struct.pack("<I", len(data)), data]
    path.write_bytes(b"".join(parts))


def regular(number: int, name: str, mount: int = ROOT, *, flags: int = 0, size: int | None = None) -> criu.File:
    entry = criu.RegularFile(flags=flags, name=name.encode(), mount=mount, size=size)
    return criu.File(type=opened.REGULAR, id=number, regular=entry)


def socket(number: int, name: str, *, deleted: bool = False, state: int = 10, mount: int = ROOT) -> criu.File:
    entry = criu.UnixSocket(inode=number, type=1, state=state, name=name.encode(), deleted=deleted, mount=mount)
    return criu.File(type=opened.UNIX, id=number, unix=entry)


def linked(file: int, target: int) -> criu.Remap:
    return criu.Remap(file=file, target=target, kind=criu.Remap.LINKED)


def ghost(file: int, target: int) -> criu.Remap:
    return criu.Remap(file=file, target=target, kind=criu.Remap.GHOST)


def container(directory: Path, *files: criu.File, remaps: Iterable[criu.Remap] = (), program: int = PROGRAM) -> Path:
    """Write the images of one process that has these files open."""
    mounts = [
        criu.Mount(type=17, id=ROOT, root="/", mountpoint="/"),
        criu.Mount(type=5, id=PRIVATE, parent=ROOT, root="/", mountpoint="/dev/shm", device=7),
        criu.Mount(type=0, type_name="ext4", id=VOLUME, parent=ROOT, root="/v", mountpoint="/volume", key="/volume"),
    ]
    write(directory / "mountpoints-9.img", images.MOUNTS, mounts)
    others = [
        criu.Mount(type=5, id=OTHER_ROOT, root="/", mountpoint="/", device=7),
        criu.Mount(type=17, id=SAME_ROOT, root="/", mountpoint="/"),
    ]
    write(directory / "mountpoints-10.img", images.MOUNTS, others)
    write(directory / "files.img", images.FILES, [regular(PROGRAM, "bin/sh"), *files])
    write(directory / "pstree.img", images.PSTREE, [criu.Process(pid=1, threads=[1])])
    write(directory / "ids-1.img", images.IDS, [criu.Kernel(mount=9)])
    write(directory / "mm-1.img", opened.MEMORY, [criu.Memory(program=program)])
    write(directory / "fs-1.img", opened.DIRECTORIES, [criu.Directories(working=PROGRAM, root=PROGRAM)])
    (directory / "tmpfs-dev-7.tar.gz.img").write_bytes(b"")
    if remaps := list(remaps):
        write(directory / opened.REMAP_FILE, opened.REMAPS, remaps)
    return directory


def ghost_of(directory: Path, number: int, mode: int) -> None:
    write(opened.ghost_file(directory, number), opened.GHOST, [criu.Ghost(mode=mode)])
