"""Puts a root filesystem's changes back: a layer's tar file, applied to a mounted root filesystem.

The tar file may come from anywhere, so nothing in it is trusted: every directory on the way to a name is opened by
itself, without following links, and what it names is reached through that descriptor. A link to the outside, in the
tar file or in the image, or swapped in meanwhile, ends in an error instead of a file on the host.
Sources: the OCI image specification, "Applying Changesets"; path_resolution(7).
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kybernate_shim.checkpoint.rootfs_diff import ENCODING, LABELS, OPAQUE, WHITEOUT, XATTR, Diff

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CHUNK = 1 << 20


class DiffInvalid(Exception):
    """The tar file is damaged, or holds an entry that must not or cannot be applied. The message names the entry."""


@dataclass(frozen=True)
class _Place:
    """A name in an open directory."""

    directory: int
    name: str

    def mode(self) -> int:
        """Return the file's mode, 0 when there is none."""
        try:
            return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0

    @contextmanager
    def pinned(self) -> Iterator[str]:
        """Hold what is there, be it a link itself, and yield a path that leads to it and to nothing else."""
        fd = os.open(self.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Delete what is there, a whole tree if need be; nothing there is fine."""
        mode = self.mode()
        if stat.S_ISDIR(mode):
            shutil.rmtree(self.name, dir_fd=self.directory)
        elif mode:
            os.unlink(self.name, dir_fd=self.directory)


def apply_diff(tar: Path, root: Path) -> Diff:
    """Apply the layer in the file `tar` to the tree at `root`, and say what was done.

    Entries replace what is there; a directory stays and takes the new attributes. Raises DiffInvalid; the tree is then
    half changed and must be thrown away.
    """
    diff = Diff()
    times: list[tuple[str, int]] = []
    with _opened(root) as top:
        try:
            with tarfile.open(tar, "r:", encoding=ENCODING) as archive:
                for info in archive:
                    _apply(archive, info, top, diff)
                    if info.isdir():
                        times.append((info.name, mtime_ns(info)))
                    archive.members = []  # type: ignore[attr-defined]  # it would keep every entry in memory
            for name, time in reversed(times):  # now that nothing is put into the directories any more
                with _place(top, name) as place, place.pinned() as path:
                    os.utime(path, ns=(time, time))
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise DiffInvalid(f"{tar}: {error}") from error
    return diff


def mtime_ns(info: tarfile.TarInfo) -> int:
    """Return the entry's time in nanoseconds, from the pax header's decimal text where there is one."""
    text = info.pax_headers.get("mtime")
    if text is None:
        return int(info.mtime) * 10**9
    seconds, _, fraction = text.partition(".")
    nanoseconds = int(fraction[:9].ljust(9, "0"))
    return int(seconds) * 10**9 + (-nanoseconds if seconds.startswith("-") else nanoseconds)


def _apply(archive: tarfile.TarFile, info: tarfile.TarInfo, top: int, diff: Diff) -> None:
    diff.entries += 1
    with _place(top, info.name) as place:
        if place.name == OPAQUE:
            _empty(place.directory)
            diff.removed += 1
        elif place.name.startswith(WHITEOUT):
            victim = place.name.removeprefix(WHITEOUT)
            if victim in ("", ".", ".."):
                raise DiffInvalid(f"{info.name!r}: a whiteout of nothing")
            _Place(place.directory, victim).remove()
            diff.removed += 1
        else:
            _create(archive, info, top, place)
            diff.bytes += info.size if info.isreg() else 0


def _create(archive: tarfile.TarFile, info: tarfile.TarInfo, top: int, place: _Place) -> None:
    if not (info.isdir() and stat.S_ISDIR(place.mode())):
        if place.name == ".":
            raise DiffInvalid(f"{info.name!r}: the root can only be a directory")
        place.remove()
        _make(archive, info, top, place)
    if not info.islnk():  # a second name of a file has the attributes already
        _set_attributes(info, place)


def _make(archive: tarfile.TarFile, info: tarfile.TarInfo, top: int, place: _Place) -> None:
    name, directory = place.name, place.directory
    if info.isreg():
        content = archive.extractfile(info)
        if content is None:
            raise DiffInvalid(f"{info.name!r}: a file without content")
        # The map of a sparse entry has no public name; without one, the whole file is data.
        _write(place, content, getattr(info, "sparse", None) or [(0, info.size)], info.size)
    elif info.isdir():
        os.mkdir(name, 0o700, dir_fd=directory)
    elif info.issym():
        os.symlink(info.linkname, name, dir_fd=directory)
    elif info.islnk():
        with _place(top, info.linkname) as target:
            os.link(target.name, name, src_dir_fd=target.directory, dst_dir_fd=directory, follow_symlinks=False)
    elif info.isfifo():
        os.mkfifo(name, 0o600, dir_fd=directory)
    elif info.ischr() or info.isblk():
        kind = stat.S_IFCHR if info.ischr() else stat.S_IFBLK
        os.mknod(name, kind | 0o600, os.makedev(info.devmajor, info.devminor), dir_fd=directory)
    else:
        raise DiffInvalid(f"{info.name!r}: an entry of the unknown type {info.type!r}")


def _write(place: _Place, content: IO[bytes], extents: Iterable[tuple[int, int]], size: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(place.name, flags, 0o600, dir_fd=place.directory)
    try:
        for offset, length in extents:
            content.seek(offset)
            _copy(content, fd, offset, length)
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _copy(content: IO[bytes], fd: int, offset: int, length: int) -> None:
    while length:
        data = content.read(min(CHUNK, length))
        if not data:
            raise DiffInvalid(f"the content ends {length} bytes too early")
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset, length = view[count:], offset + count, length - count


def _set_attributes(info: tarfile.TarInfo, place: _Place) -> None:
    """Set owner, mode, attributes and time, in this order: each of them may clear or change a later one."""
    time = mtime_ns(info)
    with place.pinned() as path:
        os.chown(path, info.uid, info.gid)
        if not info.issym():
            Path(path).chmod(info.mode)
        _set_xattrs(info, path)
        os.utime(path, ns=(time, time))


def _set_xattrs(info: tarfile.TarInfo, path: str) -> None:
    """Give the file exactly the attributes of the entry; a directory's default ACL may have added others."""
    wanted = {
        name.removeprefix(XATTR): value.encode(errors="surrogateescape")
        for name, value in info.pax_headers.items()
        if name.startswith(XATTR)
    }
    for name in os.listxattr(path):
        if name not in wanted and name not in LABELS:
            os.removexattr(path, name)
    for name, value in wanted.items():
        os.setxattr(path, name, value)


def _empty(directory: int) -> None:
    for name in os.listdir(directory):
        _Place(directory, name).remove()


@contextmanager
def _place(top: int, name: str) -> Iterator[_Place]:
    """Open the directory that holds `name`, step by step from `top`, following no link."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise DiffInvalid(f"{name!r}: not a name inside the root filesystem")
    directory = os.dup(top)
    try:
        for part in parts[:-1]:
            try:
                inner = os.open(part, DIRECTORY, dir_fd=directory)
            except OSError as error:
                raise DiffInvalid(f"{name!r}: {part!r} on the way is no directory ({error.strerror})") from error
            os.close(directory)
            directory = inner
        yield _Place(directory, parts[-1] if parts else ".")
    finally:
        os.close(directory)


@contextmanager
def _opened(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
