"""Names of files that a restore needs and that only the dump can know: they are in the image, and made again.

Where the name of an open file is gone and the file has another one, CRIU finds it by a hard link that it makes. It
removes that link at the end of a dump that leaves the container running, before anything else could take it into an
image. So the image says which other name the file has, and a restore makes CRIU's link to it again, which CRIU then
removes.

CRIU binds a UNIX socket to the path that the program gave, though it may have been renamed since. Where it lies is
known by its file (SIOCUNIXFILE): after CRIU has bound it, and before a process runs, it is moved there.
Sources: CRIU's files-reg.c, `create_link_remap` and `delete_link_remaps`, and sk-unix.c; the kernel's unix_open_file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.codec import from_json, parse, to_json
from kybernate_shim.checkpoint.image.store import CheckpointInvalid
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.mounts.paths import is_normal
from kybernate_shim.errors import HeldFailed
from kybernate_shim.linux import openat2
from kybernate_shim.linux.beneath import BELOW
from kybernate_shim.linux.plain_files import DIRECTORY, read_plain
from kybernate_shim.linux.private_files import write_private

FILE: Final = "kybernate-names.json"
MOST_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Name:
    """A path of the container at which a restore needs what is at another one: `path` is what CRIU uses.

    `mount` is the destination of the mount that `path` is on, "/" for the root filesystem. `missing` is the topmost
    directory above `path` that there was not, "" where all were there.
    """

    path: str
    other: str
    mount: str = "/"
    missing: str = ""


@dataclass(frozen=True)
class Names:
    """`links`: before CRIU begins, `path` must be a hard link to `other`. `sockets`: CRIU binds `path`, which then
    becomes `other`.
    """

    links: tuple[Name, ...] = ()
    sockets: tuple[Name, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.links or self.sockets)


def write(directory: Path, names: Names) -> None:
    """Put the names into an image, if there are any. Raises OSError."""
    if names:
        write_private(directory / FILE, json.dumps(to_json(names), separators=(",", ":")))


def read(directory: Path) -> Names:
    """Return the names of an image, which may have none. Raises CheckpointInvalid."""
    try:
        content = read_plain(directory / FILE, most=MOST_BYTES)
    except FileNotFoundError:
        return Names()
    except OSError as error:
        raise CheckpointInvalid(f"{directory / FILE}: {error.strerror}") from error
    try:
        found: Names = from_json(Names, parse(content))
    except ValueError as error:
        raise CheckpointInvalid(f"{directory / FILE}: {error}") from error
    for one in (*found.links, *found.sockets):
        if not _is_valid(one):
            raise CheckpointInvalid(
                f"{directory / FILE}: {one.path[:100]!a} and {one.other[:100]!a} are not such paths"
            )
    return found


def _is_valid(one: Name) -> bool:
    if not (is_normal(one.path) and is_normal(one.other) and (one.mount == "/" or is_normal(one.mount))):
        return False
    above = one.mount.rstrip("/") + "/"
    return one.path.startswith(above) and (not one.missing or f"{one.path}/".startswith(f"{one.missing}/"))


def make_links(names: Names, mounts: SpecMounts, rootfs: Path) -> None:
    """Make the hard links in the new container's filesystems. Raises HeldFailed."""
    for one in names.links:
        try:
            with _opened(one, mounts, rootfs) as top:
                _link(top, *_inside(one))
        except OSError as error:
            raise HeldFailed(
                f"{one.path} cannot be made a name of {one.other}, which a process of the image has open under a name"
                f" that was removed: {error.strerror}. Nothing was restored; the file must be where it was"
            ) from error


def make_directories(names: Names, mounts: SpecMounts, rootfs: Path) -> None:
    """Make the directories in which CRIU binds sockets that were moved since. Raises HeldFailed."""
    for one in names.sockets:
        if not one.missing:
            continue
        try:
            with _opened(one, mounts, rootfs) as top:
                _make_parents(top, _inside(one)[0])
        except OSError as error:
            raise HeldFailed(
                f"the directory of {one.path}, where CRIU binds a socket before it is moved to {one.other}, cannot be"
                f" made: {error.strerror}. Nothing was restored"
            ) from error


def move_sockets(names: Names, root: Path) -> None:
    """Move the sockets that CRIU has bound to where they were, below the root directory of a restored process.

    Directories that were made for this alone are removed. Raises OSError.
    """
    if not names.sockets:
        return
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for one in names.sockets:
            _move(top, one)
    finally:
        os.close(top)


def _move(top: int, one: Name) -> None:
    with _parent(top, one.path.strip("/")) as (near, name), _parent(top, one.other.strip("/")) as (far, other):
        if not stat.S_ISSOCK(os.stat(name, dir_fd=near, follow_symlinks=False).st_mode):
            raise FileNotFoundError(2, "CRIU has bound no socket there", one.path)
        os.rename(name, other, src_dir_fd=near, dst_dir_fd=far)
    made = one.path.rpartition("/")[0]
    while one.missing and f"{made}/".startswith(f"{one.missing}/"):
        with _parent(top, made.strip("/")) as (above, name), suppress(OSError):
            os.rmdir(name, dir_fd=above)
        made = made.rpartition("/")[0]


def _inside(one: Name) -> tuple[str, str]:
    """Return both paths below the mount."""
    return tuple(path.removeprefix(one.mount).strip("/") for path in (one.path, one.other))  # type: ignore[return-value]


@contextmanager
def _opened(one: Name, mounts: SpecMounts, rootfs: Path) -> Iterator[int]:
    """Open the directory that the new container has at the mount."""
    place = rootfs if one.mount == "/" else Path(mounts.binds.get(one.mount, ""))
    if not place.is_absolute():
        raise FileNotFoundError(2, "the new container has no such mount", one.mount)
    top = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield top
    finally:
        os.close(top)


def _link(top: int, path: str, other: str) -> None:
    """Link below an open directory, where no link is followed; the same link already is fine."""
    with _parent(top, path) as (near, name), _parent(top, other) as (far, there):
        status = os.stat(there, dir_fd=far, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, os.strerror(21), other)
        try:
            os.link(there, name, src_dir_fd=far, dst_dir_fd=near, follow_symlinks=False)
        except FileExistsError:
            if not os.path.samestat(status, os.stat(name, dir_fd=near, follow_symlinks=False)):
                raise


@contextmanager
def _parent(top: int, path: str) -> Iterator[tuple[int, str]]:
    """Open the directory that has `path` below another one, and yield it with the last part of the name."""
    above, _, name = path.rpartition("/")
    directory = openat2.openat2(top, above or ".", DIRECTORY, BELOW)
    try:
        yield directory, name
    finally:
        os.close(directory)


def _make_parents(top: int, path: str) -> None:
    parts: Sequence[str] = path.split("/")[:-1]
    for count in range(1, len(parts) + 1):
        with _parent(top, "/".join(parts[:count])) as (directory, name), suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
