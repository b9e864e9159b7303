"""The changes of a container's root filesystem, as a tar file in the form of an OCI image layer.

Read from the overlay's upper directory, so the cost depends on what changed, not on the size of the image. The
container must be frozen meanwhile. Times have nanoseconds, and extended attributes, hard links, devices and holes are
kept; sockets are not, since no process could listen on them.
Sources: the OCI image specification, "Image Layer Filesystem Changeset"; pax(1), "pax Extended Header"; GNU tar's
manual, "Storing Sparse Files".
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, cast

from kybernate_shim.checkpoint.rootfs.overlay import Overlay, RootfsUnsupported
from kybernate_shim.linux.private_files import create_private

NAME: Final = "kybernate-rootfs-diff.tar"
WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"
XATTR: Final = "SCHILY.xattr."
# A label belongs to the place where a file is, not to the file: the runtime and the policy there give a new one.
LABELS: Final = frozenset({"security.selinux"})
MOST_HEADER: Final = 4 << 20  # bytes of an entry's names, attributes and map of holes
MOST_EXTENTS: Final = 100_000  # their map is at most 40 bytes each; a file with more is written with its holes filled
BLOCK: Final = tarfile.BLOCKSIZE
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
    tar: tarfile.TarFile
    exclude: frozenset[str]
    stopped: Callable[[], bool]
    diff: Diff = field(default_factory=Diff)
    links: dict[tuple[int, int], str] = field(default_factory=dict)


def write_diff(
    overlay: Overlay, target: Path, *, exclude: Iterable[str] = (), stopped: Callable[[], bool] = lambda: False
) -> Diff:
    """Write the changes in `overlay` to the new file `target`.

    `exclude` are the destinations of the container's mounts: what lies there is hidden, and was put there by the
    runtime. Raises RootfsUnsupported for what a layer cannot express (redirected directories, files without their data,
    names that begin with ".wh."), OSError when the disk is full, and DiffStopped soon after `stopped` has become true;
    `target` does not exist then.
    """
    hidden = frozenset(destination.strip("/") for destination in exclude)
    try:
        with (
            create_private(target, exclusive=True) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, encoding=ENCODING) as tar,
        ):
            writer = _Writer(overlay, tar, hidden, stopped)
            _directory(writer, overlay.upper, ".")
        return writer.diff
    except FileExistsError:
        raise
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _directory(writer: _Writer, path: Path, name: str) -> None:
    """Add the directory and all below. A loop instead of recursion: depth is the container's choice."""
    pending = [(path, name)]
    while pending:
        if writer.stopped():
            raise DiffStopped("the diff was stopped before its end")
        path, name = pending.pop()
        _add(writer, path, name, path.lstat())
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        for entry in entries:
            inner = entry.name if name == "." else f"{name}/{entry.name}"
            if inner in writer.exclude:
                continue
            if entry.name.startswith(WHITEOUT):
                raise RootfsUnsupported(f"/{inner}: a layer cannot hold a file whose name begins with {WHITEOUT}")
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append((Path(entry.path), inner))
            elif not stat.S_ISSOCK(status.st_mode):
                _add(writer, Path(entry.path), inner, status)


def _add(writer: _Writer, path: Path, name: str, status: os.stat_result) -> None:
    xattrs, private = _xattrs(path, writer.overlay.private)
    for word, meaning in (("redirect", "a moved directory"), ("metacopy", "a file whose data is in a lower layer")):
        if word in private:
            raise RootfsUnsupported(f"/{name}: {meaning}; mount the overlay with redirect_dir=off,metacopy=off")
    if _is_whiteout(status, private):
        _add_mark(writer, _beside(name, WHITEOUT + path.name))
        return
    info = _describe(path, name, status, xattrs)
    key = (status.st_dev, status.st_ino)
    if not info.isdir() and status.st_nlink > 1 and key in writer.links:
        info.type, info.linkname, info.size = tarfile.LNKTYPE, writer.links[key], 0
    writer.links.setdefault(key, name)
    _put(writer, path, info, status)
    if private.get("opaque") == b"y":
        # First in its directory: applying it empties what the layers below have there.
        _add_mark(writer, OPAQUE if name == "." else f"{name}/{OPAQUE}")


def _put(writer: _Writer, path: Path, info: tarfile.TarInfo, status: os.stat_result) -> None:
    writer.diff.entries += 1
    if not info.isreg():
        writer.tar.addfile(info)
        return
    writer.diff.bytes += info.size
    with path.open("rb") as content:
        extents = _extents_of(content, info.size) if status.st_blocks * BLOCK < info.size else []
        if extents:
            _put_sparse(writer, info, content, extents)
        else:
            writer.tar.addfile(info, cast(BinaryIO, _UntilStopped(content, writer.stopped)))


def _extents_of(content: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Return the stretches of data, none where they are too many for a map."""
    extents = list(islice(_extents(content.fileno(), size), MOST_EXTENTS + 1))
    os.lseek(content.fileno(), 0, os.SEEK_SET)  # which the stream, whose buffer is empty, does not do by itself
    return extents if len(extents) <= MOST_EXTENTS else []


def _put_sparse(writer: _Writer, info: tarfile.TarInfo, content: BinaryIO, extents: list[tuple[int, int]]) -> None:
    """Add a file with holes: a map of its data in decimal, filled up to a block, and then the data alone."""
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    index = "".join(f"{number}\n" for number in numbers).encode()
    index += bytes(-len(index) % BLOCK)
    headers = {"major": "1", "minor": "0", "name": info.name, "realsize": str(info.size)}
    info.pax_headers = {**info.pax_headers, **{f"GNU.sparse.{key}": value for key, value in headers.items()}}
    info.size = len(index) + sum(length for _, length in extents)
    data = io.BufferedReader(_Sparse(index, extents, content))
    writer.tar.addfile(info, cast(BinaryIO, _UntilStopped(data, writer.stopped)))


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


class _UntilStopped:
    """What an entry is read from, for as long as a diff is wanted. Raises DiffStopped."""

    def __init__(self, content: BinaryIO | io.BufferedReader, stopped: Callable[[], bool]) -> None:
        self._content, self._stopped = content, stopped

    def read(self, size: int = -1) -> bytes:
        if self._stopped():
            raise DiffStopped("the diff was stopped before its end")
        return self._content.read(size)


class _Sparse(io.RawIOBase):
    """The stream that a sparse entry holds: its index, then its data without the holes."""

    def __init__(self, index: bytes, extents: list[tuple[int, int]], content: BinaryIO) -> None:
        self._index, self._extents, self._fd = index, [list(extent) for extent in extents], content.fileno()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer is Python 3.12's
        view = memoryview(buffer)
        if self._index:
            count = min(len(view), len(self._index))
            view[:count], self._index = self._index[:count], self._index[count:]
            return count
        while self._extents and self._extents[0][1] == 0:
            self._extents.pop(0)
        if not self._extents:
            return 0
        extent = self._extents[0]
        count = os.preadv(self._fd, [view[: extent[1]]], extent[0])
        extent[0] += count
        extent[1] -= count
        return count


def _describe(path: Path, name: str, status: os.stat_result, xattrs: dict[str, bytes]) -> tarfile.TarInfo:
    kinds = {
        stat.S_IFREG: tarfile.REGTYPE,
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFLNK: tarfile.SYMTYPE,
        stat.S_IFCHR: tarfile.CHRTYPE,
        stat.S_IFBLK: tarfile.BLKTYPE,
        stat.S_IFIFO: tarfile.FIFOTYPE,
    }
    info = tarfile.TarInfo(name)
    info.type = kinds[stat.S_IFMT(status.st_mode)]
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid, info.gid = status.st_uid, status.st_gid
    info.size = status.st_size if info.isreg() else 0
    if info.issym():
        info.linkname = str(path.readlink())
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
    writer.tar.addfile(info)
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


def _xattrs(path: Path, prefix: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the attributes that the container sees, and those by which the overlay works, the latter by short name.

    An overlay within the container escapes its own attributes by a second `overlay.`, which is taken off here.
    """
    seen, private = {}, {}
    for name in os.listxattr(path, follow_symlinks=False):
        if name in LABELS:
            continue
        value = os.getxattr(path, name, follow_symlinks=False)
        if not name.startswith(prefix):
            seen[name] = value
        elif name.startswith(f"{prefix}overlay."):
            seen[prefix + name.removeprefix(f"{prefix}overlay.")] = value
        else:
            private[name.removeprefix(prefix)] = value
    if odd := next((name for name in seen if "=" in name), None):
        raise RootfsUnsupported(f"{path}: the attribute {odd!r} has a name that a tar file cannot hold")
    return seen, private
