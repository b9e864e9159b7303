"""The changes of a container's root filesystem, as a tar file in the form of an OCI image layer.

Read from the overlay's upper directory, so the cost depends on what changed, not on the size of the image. The
container must be frozen meanwhile; others of its pod, to which it may have given descriptors of its directories, are
not, and so nothing is reached by its path. Times have nanoseconds, and extended attributes, hard links, devices and
holes are kept; sockets are not, since no process could listen on them.
Sources: the OCI image specification, "Image Layer Filesystem Changeset"; pax(1), "pax Extended Header"; GNU tar's
manual, "Storing Sparse Files".
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from kybernate_shim.checkpoint.image.store import require_space
from kybernate_shim.checkpoint.rootfs.overlay import Overlay, RootfsUnsupported
from kybernate_shim.linux.beneath import Found, TreeChanged, closing, open_top, walk
from kybernate_shim.linux.private_files import create_private

NAME: Final = "kybernate-rootfs-diff.tar"
WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"
XATTR: Final = "SCHILY.xattr."
# A label belongs to the place where a file is, not to the file: the runtime and the policy there give a new one.
LABELS: Final = frozenset({"security.selinux"})
MOST_HEADER: Final = 4 << 20  # bytes of an entry's names, attributes and map of holes
MOST_EXTENTS: Final = 100_000  # their map is at most 40 bytes each; a file with more is written with its holes filled
MOST_ATTRIBUTES: Final = MOST_HEADER // 4  # the rest is for the names, and for a map of holes
UNASKED: Final = 16 << 20  # bytes of a file up to which the disk's room is not examined
BLOCK: Final = tarfile.BLOCKSIZE
CHUNK: Final = 256 << 10
ENCODING: Final = "utf-8"  # for names; other bytes in them pass through, as Python does it everywhere


class DiffStopped(Exception):
    """The diff was stopped before its end; its file does not exist."""


@dataclass
class Diff:
    """What was done: entries of all kinds, `removed` of them whiteouts and opaque marks, and bytes of regular files."""

    entries: int = 0
    removed: int = 0
    bytes: int = 0


@dataclass
class _Writer:
    overlay: Overlay
    stream: BinaryIO
    check: Callable[[], None]
    room: Callable[[int], None]
    diff: Diff = field(default_factory=Diff)
    links: dict[tuple[int, int], str] = field(default_factory=dict)


def write_diff(
    overlay: Overlay, target: Path, *, exclude: Iterable[str] = (), stopped: Callable[[], bool] = lambda: False
) -> Diff:
    """Write the changes in `overlay` to the new file `target`.

    `exclude` are the destinations of the container's mounts: what lies there is hidden, and was put there by the
    runtime. Other containers of the pod may change the tree meanwhile: they can make the diff fail, and no more. Raises
    RootfsUnsupported for what a layer cannot express (redirected directories, files without their data, names that
    begin with ".wh."), TierFull before a file that does not fit on the disk, TreeChanged, TreeTooLarge and other
    OSErrors, and DiffStopped soon after `stopped` has become true; `target` does not exist then.
    """
    hidden = frozenset(destination.strip("/") for destination in exclude)

    def check() -> None:
        if stopped():
            raise DiffStopped("the diff was stopped before its end")

    try:
        with (
            create_private(target, exclusive=True) as stream,
            closing(open_top(overlay.upper)) as top,
        ):
            writer = _Writer(overlay, stream, check, partial(_require_room, target.parent))
            for found in walk(top, skip=hidden.__contains__, check=check):
                _add(writer, found)
            stream.write(bytes(2 * BLOCK))
            stream.write(bytes(-stream.tell() % tarfile.RECORDSIZE))
        return writer.diff
    except FileExistsError:
        raise
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _require_room(directory: Path, size: int) -> None:
    """Raise TierFull where a file of that size, with its holes filled, would fill the disk of `directory`."""
    if size > UNASKED:
        require_space(directory, size, what="changed files of the root filesystem")


def _add(writer: _Writer, found: Found) -> None:
    name, status = found.name, found.status
    if found.base.startswith(WHITEOUT):
        raise RootfsUnsupported(f"/{name}: a layer cannot hold a file whose name begins with {WHITEOUT}")
    if stat.S_ISSOCK(status.st_mode):
        return
    xattrs, private = _xattrs(found, writer.overlay.private)
    for word, meaning in (("redirect", "a moved directory"), ("metacopy", "a file whose data is in a lower layer")):
        if word in private:
            raise RootfsUnsupported(f"/{name}: {meaning}; mount the overlay with redirect_dir=off,metacopy=off")
    if _is_whiteout(status, private):
        _add_mark(writer, _beside(name, WHITEOUT + found.base))
        return
    info = _describe(found, xattrs)
    if not info.isdir() and status.st_nlink > 1:
        first = writer.links.setdefault((status.st_dev, status.st_ino), name)
        if first != name:
            info.type, info.linkname, info.size = tarfile.LNKTYPE, first, 0
    _put(writer, found, info)
    if private.get("opaque") == b"y":
        # First in its directory: applying it empties what the layers below have there.
        _add_mark(writer, OPAQUE if name == "." else f"{name}/{OPAQUE}")


def _put(writer: _Writer, found: Found, info: tarfile.TarInfo) -> None:
    writer.diff.entries += 1
    writer.diff.bytes += info.size
    extents = [(0, info.size)] if info.size else []
    index = b""
    if found.status.st_blocks * BLOCK < info.size and (data := _extents_of(found.fd, info.size)):
        extents, index = data, _make_sparse(info, data)
    writer.room(info.size)
    writer.stream.write(_header(info) + index)
    for offset, length in extents:
        _copy(writer, found, offset, length)
    writer.stream.write(bytes(-info.size % BLOCK))


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, ENCODING, "surrogateescape")


def _copy(writer: _Writer, found: Found, offset: int, length: int) -> None:
    while length:
        writer.check()
        data = os.pread(found.fd, min(CHUNK, length), offset)
        if not data:
            raise TreeChanged(found.name, "made shorter while the tree was read")
        writer.stream.write(data)
        offset, length = offset + len(data), length - len(data)


def _extents_of(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the stretches of data, none where they are too many for a map."""
    extents = list(islice(_extents(fd, size), MOST_EXTENTS + 1))
    return extents if len(extents) <= MOST_EXTENTS else []


def _make_sparse(info: tarfile.TarInfo, extents: list[tuple[int, int]]) -> bytes:
    """Make the entry one of a file with holes, and return the map of its data: decimal, filled up to a block."""
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    index = "".join(f"{number}\n" for number in numbers).encode()
    index += bytes(-len(index) % BLOCK)
    headers = {"major": "1", "minor": "0", "name": info.name, "realsize": str(info.size)}
    info.pax_headers = {**info.pax_headers, **{f"GNU.sparse.{key}": value for key, value in headers.items()}}
    info.size = len(index) + sum(length for _, length in extents)
    return index


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each stretch of data, and the file's end as an empty one, as GNU tar does."""
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data after this offset
                raise
            break
        offset = min(size, os.lseek(fd, begin, os.SEEK_HOLE))
        yield begin, offset - begin
    yield size, 0


def _describe(found: Found, xattrs: dict[str, bytes]) -> tarfile.TarInfo:
    status = found.status
    kinds = {
        stat.S_IFREG: tarfile.REGTYPE,
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFLNK: tarfile.SYMTYPE,
        stat.S_IFCHR: tarfile.CHRTYPE,
        stat.S_IFBLK: tarfile.BLKTYPE,
        stat.S_IFIFO: tarfile.FIFOTYPE,
    }
    info = tarfile.TarInfo(found.name)
    info.type = kinds[stat.S_IFMT(status.st_mode)]
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid, info.gid = status.st_uid, status.st_gid
    info.size = status.st_size if info.isreg() else 0
    if info.issym():
        info.linkname = found.link()
    if info.ischr() or info.isblk():
        info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
    # The time is written by hand, since a float has not enough digits for nanoseconds.
    info.pax_headers = {
        "mtime": decimal_seconds(status.st_mtime_ns),
        **{XATTR + key: value.decode(errors="surrogateescape") for key, value in xattrs.items()},
    }
    return info


def decimal_seconds(nanoseconds: int) -> str:
    """Return a time as pax wants it: seconds with nine digits after the point."""
    sign = "-" if nanoseconds < 0 else ""
    return f"{sign}{abs(nanoseconds) // 10**9}.{abs(nanoseconds) % 10**9:09d}"


def _add_mark(writer: _Writer, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.mode = 0
    writer.stream.write(_header(info))
    writer.diff.entries += 1
    writer.diff.removed += 1


def _beside(name: str, other: str) -> str:
    parent = name.rpartition("/")[0]
    return f"{parent}/{other}" if parent else other


def _is_whiteout(status: os.stat_result, private: dict[str, bytes]) -> bool:
    """Return whether the entry says "deleted": a device 0/0, or since Linux 6.7 an empty file marked as one."""
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    return stat.S_ISREG(status.st_mode) and status.st_size == 0 and "whiteout" in private


def _xattrs(found: Found, prefix: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the attributes that the container sees, and those by which the overlay works, the latter by short name.

    An overlay within the container escapes its own attributes by a second `overlay.`, which is taken off here.
    """
    attributes = found.attributes()
    if not attributes:
        return {}, {}
    seen, private = {}, {}
    for name in attributes:
        if name in LABELS:
            continue
        if not name.startswith(prefix):
            seen[name] = attributes[name]
        elif name.startswith(f"{prefix}overlay."):
            seen[prefix + name.removeprefix(f"{prefix}overlay.")] = attributes[name]
        else:
            private[name.removeprefix(prefix)] = attributes[name]
    if odd := next((name for name in seen if "=" in name), None):
        raise RootfsUnsupported(f"/{found.name}: the attribute {odd!r} has a name that a tar file cannot hold")
    if sum(len(name) + len(value) for name, value in seen.items()) > MOST_ATTRIBUTES:
        raise RootfsUnsupported(f"/{found.name}: more than {MOST_ATTRIBUTES} bytes of attributes")
    return seen, private
