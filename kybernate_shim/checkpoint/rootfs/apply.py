"""Puts a root filesystem's changes back: a layer's tar file, applied to a mounted root filesystem.

The tar file may come from anywhere, so nothing in it is trusted: the directory of a name is opened below the root
filesystem, without following links, and what the name stands for is reached through that descriptor. A link to the
outside, in the tar file or in the image, or swapped in meanwhile, ends in an error instead of a file on the host.

A diff may hold what a layer of an OCI image may, since the author of a pod chooses that as well: owners, setuid bits,
`security.capability`. Device nodes and `trusted.` attributes are for containers that can make them themselves. Labels
of the security modules are the node's, and are left as they are.
Sources: the OCI image specification, "Applying Changesets"; path_resolution(7); xattr(7).
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from kybernate_shim.checkpoint.rootfs.diff import OPAQUE, WHITEOUT, Diff
from kybernate_shim.checkpoint.tar_entry import Entry
from kybernate_shim.checkpoint.tree_tar import ENCODING, MOST_HEADER, XATTR
from kybernate_shim.errors import Damaged, Stopped
from kybernate_shim.linux import beneath
from kybernate_shim.linux.attribute_ids import CAPABILITY, Owners, moved_ids
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.oci.spec import Spec

# What a diff has at most: a walk's limits, and an opaque mark in each directory.
MOST_ENTRIES = 2 * beneath.MOST_FILES
MOST_NAME_BYTES = beneath.MOST_DIRECTORY_BYTES  # of all directories together, whose times are set last
LONGEST_NAME = beneath.LONGEST_NAME
PORTABLE = ("user.", "system.posix_acl_", "trusted.")  # begin the names of attributes that travel with a file
CHUNK = 1 << 20
UNCOUNTED_RECORDS = 1 << 16
RECORD_BYTES = 32  # of a diff for each record in it


@dataclass(frozen=True)
class Powers:
    """What the container can make by itself, and so may find in its root filesystem."""

    devices: bool = True
    trusted_attributes: bool = True
    programs_with_rights: bool = True  # those that are executed with the rights of their owner, group or capability

    @classmethod
    def of(cls, spec: Spec) -> Powers:
        """Return the powers of a container's first process and of every program that it may execute."""
        bounding = (spec.process.get("capabilities") or {}).get("bounding") or ()
        return cls(devices="CAP_MKNOD" in bounding, trusted_attributes="CAP_SYS_ADMIN" in bounding)

    @classmethod
    def in_volume(cls, spec: Spec) -> Powers:
        """Return the same for a volume, whose content is from no container image, unlike that of a root filesystem."""
        bounding = (spec.process.get("capabilities") or {}).get("bounding") or ()
        return replace(cls.of(spec), programs_with_rights="CAP_SETUID" in bounding)


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
        """Hold what is there, even if it is a link, and yield a path that leads to it and to nothing else."""
        with beneath.closing(beneath.pin(self.directory, self.name)) as fd:
            yield beneath.path_of(fd)

    def remove(self) -> None:
        """Delete what is there, a whole tree if need be; nothing there is fine."""
        mode = self.mode()
        if stat.S_ISDIR(mode):
            shutil.rmtree(self.name, dir_fd=self.directory)
        elif mode:
            os.unlink(self.name, dir_fd=self.directory)


class Headers(io.BufferedReader):
    """The tar file as tarfile reads it: for each entry, only so much of what is not a file's content.

    A header may announce names, attributes and maps of holes of any length, and tarfile keeps all of them in memory. A
    record may be as short as six bytes, and takes as much time as that of an attribute, which has some thirty.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(io.FileIO(fd))
        self._bytes = self._records = self._position = 0
        self.next_entry()

    def next_entry(self) -> None:
        self._left, self.in_content = MOST_HEADER, False

    def read(self, size: int | None = -1, /) -> bytes:
        if not self.in_content:
            self._left -= size or 0
            if size is None or size < 0 or self._left < 0:
                raise Damaged(f"an entry with more than {MOST_HEADER} bytes of names, attributes and holes")
        content = super().read(size)
        self._bytes += len(content)
        self._position += len(content)
        if not self.in_content and len(content) > tarfile.BLOCKSIZE:
            most = UNCOUNTED_RECORDS + self._bytes // RECORD_BYTES
            self._records += _records(content, most)
            if self._records > most:
                raise Damaged(f"entries with more than a record in {RECORD_BYTES} bytes")
        return content

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = super().seek(target, whence)
        return self._position

    def tell(self) -> int:
        return self._position  # tarfile asks four times for each entry, and each is a call of the kernel elsewhere


def _records(header: bytes, most: int) -> int:
    """Return the number of the records `LENGTH KEY=VALUE` at the beginning of a header, counted to one above `most`."""
    count = begin = 0
    while count <= most:
        digits = header[begin : begin + 8].partition(b" ")[0]
        if not digits.isdigit() or len(digits) == 8:
            break
        begin += int(digits) or len(header)
        count += 1
    return count


@dataclass
class _Parent:
    """The directory of the last name below `top`, which stays open for names in the same one, if it `stays`.

    It is opened following no link.
    """

    top: int
    stays: bool = False
    _name: str = ""
    _fd: int = -1

    @contextmanager
    def place(self, name: str) -> Iterator[_Place]:
        """Yield the place of a name, which is good until the next one is wanted."""
        parent, base = _parted(name)
        if self._fd < 0 or parent != self._name:
            self.close()
            self._fd, self._name = _open_parent(self.top, name, parent), parent
        try:
            yield _Place(self._fd, base)
        finally:
            if not self.stays:
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass
class _Work:
    """A diff that is being applied. `headers` is what `archive` reads from.

    `parent` has the directory of the last entry, `linked` that of the file to which the last hard link led.
    """

    archive: tarfile.TarFile
    headers: Headers
    parent: _Parent
    linked: _Parent
    powers: Powers
    owners: Owners
    stopped: Callable[[], bool]
    layer: bool
    keep: bool
    diff: Diff


def apply_diff(
    tar: Path,
    root: Path | int,
    *,
    size: int | None = None,
    powers: Powers | None = None,
    owners: Owners = lambda user, group: (user, group),
    stopped: Callable[[], bool] = lambda: False,
    layer: bool = True,
    keep: bool = False,
) -> Diff:
    """Apply the layer in the file `tar`, of `size` bytes, to the tree at `root`, and say what was done; blocks.

    `root` is a path, or a descriptor of a directory.

    Entries replace what is there; a directory stays and takes the new attributes. With `keep`, what is there stays as
    it is. `layer`: names that begin with ".wh." remove others. `powers` are the new container's, None for all. `owners`
    maps a user and a group to those that a file and its attributes get. Raises Damaged, and Stopped soon after
    `stopped` returns true; the tree is then half changed and must be thrown away.
    """
    try:
        with beneath.closing(_opened(root)) as top, Headers(open_plain(tar)) as headers:
            found = os.fstat(headers.fileno()).st_size
            if size is not None and found != size:
                raise Damaged(f"{found} bytes found, {size} expected")
            # Other containers have a pod's volumes, and may move a directory of one elsewhere.
            parent, linked = _Parent(top, stays=layer), _Parent(top, stays=layer)
            with (
                tarfile.open(fileobj=headers, mode="r:", encoding=ENCODING, tarinfo=Entry) as archive,
                closing(parent),
                closing(linked),
            ):
                work = _Work(archive, headers, parent, linked, powers or Powers(), owners, stopped, layer, keep, Diff())
                for name, time in reversed(_apply_all(work)):  # now that nothing is put into the directories any more
                    with parent.place(name) as place, place.pinned() as path:
                        os.utime(path, ns=(time, time))
            return work.diff
    except Damaged as error:
        raise Damaged(f"{tar}: {error}") from error
    except (tarfile.TarError, OSError, ValueError, EOFError, OverflowError, RecursionError) as error:
        raise Damaged(f"{tar}: {error}") from error


def _opened(root: Path | int) -> int:
    return beneath.open_directory(root, ".") if isinstance(root, int) else beneath.open_top(root)


def _apply_all(work: _Work) -> list[tuple[str, int]]:
    """Apply all entries, and return the directories with their times."""
    times: list[tuple[str, int]] = []
    left = MOST_NAME_BYTES
    for info in _entries(work):
        if _apply(work, info) and info.isdir():
            left -= len(info.name)
            if left < 0:
                raise Damaged(f"directories with more than {MOST_NAME_BYTES} bytes of names")
            times.append((info.name, mtime_ns(info)))
    return times


def _entries(work: _Work) -> Iterator[tarfile.TarInfo]:
    """Yield the entries one by one, each within its limits. Raises Damaged and Stopped."""
    for number, info in enumerate(work.archive):
        if work.stopped():
            raise Stopped
        if number >= MOST_ENTRIES:
            raise Damaged(f"more than {MOST_ENTRIES} entries")
        if work.archive.pax_headers:
            raise Damaged("a header for all entries, which no diff contains")
        if max(len(info.name), len(info.linkname)) > LONGEST_NAME:
            raise Damaged(f"{info.name[:60]!r}…: a name of more than {LONGEST_NAME} characters")
        work.headers.in_content = True
        yield info
        work.headers.next_entry()
        work.archive.members = []  # type: ignore[attr-defined]  # it would keep every entry in memory


def mtime_ns(info: tarfile.TarInfo) -> int:
    """Return the entry's time in nanoseconds, from the pax header's decimal text where there is one."""
    text = info.pax_headers.get("mtime")
    if text is None:
        return int(info.mtime) * 10**9
    seconds, _, fraction = text.partition(".")
    nanoseconds = int(fraction[:9].ljust(9, "0"))
    return int(seconds) * 10**9 + (-nanoseconds if seconds.startswith("-") else nanoseconds)


def _apply(work: _Work, info: tarfile.TarInfo) -> bool:
    """Apply one entry, and return whether it had an effect."""
    diff = work.diff
    diff.entries += 1
    with work.parent.place(info.name) as place:
        if work.keep and place.mode():
            return False
        if work.layer and place.name == OPAQUE:
            _empty(work, place.directory)
            diff.removed += 1
        elif work.layer and place.name.startswith(WHITEOUT):
            victim = place.name.removeprefix(WHITEOUT)
            if victim in ("", ".", ".."):
                raise Damaged(f"{info.name!r}: a whiteout without a name")
            _remove(work, _Place(place.directory, victim))
            diff.removed += 1
        else:
            _create(work, info, place)
            diff.bytes += info.size if info.isreg() else 0
    return True


def _create(work: _Work, info: tarfile.TarInfo, place: _Place) -> None:
    if place.name == "." and not info.isdir():
        raise Damaged(f"{info.name!r}: the root can only be a directory")
    make = _make_file if info.isreg() else _make
    try:
        make(work, info, place)
    except FileExistsError:
        if not (info.isdir() and stat.S_ISDIR(place.mode())):
            _remove(work, place)
            make(work, info, place)
    if not (info.isreg() or info.islnk()):  # a second name of a file has the attributes already
        with place.pinned() as path:
            _set_attributes(work, info, path)


def _make_file(work: _Work, info: tarfile.TarInfo, place: _Place) -> None:
    """Make a regular file with its content and attributes.

    All is done to the file that was made, though a container that has a volume, too, may put another one in its place.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with beneath.closing(os.open(place.name, flags, 0o600, dir_fd=place.directory)) as fd:
        _write(work, info, fd)
        _set_attributes(work, info, fd)


def _make(work: _Work, info: tarfile.TarInfo, place: _Place) -> None:
    """Make a file of another kind."""
    name, directory = place.name, place.directory
    if info.isdir():
        os.mkdir(name, 0o700, dir_fd=directory)
    elif info.issym():
        os.symlink(info.linkname, name, dir_fd=directory)
    elif info.islnk():
        with work.linked.place(info.linkname) as target:
            os.link(target.name, name, src_dir_fd=target.directory, dst_dir_fd=directory, follow_symlinks=False)
    elif info.isfifo():
        os.mkfifo(name, 0o600, dir_fd=directory)
    elif info.ischr() or info.isblk():
        if not work.powers.devices:
            raise Damaged(f"{info.name!r}: a device node, and the new container has no CAP_MKNOD to make one")
        kind = stat.S_IFCHR if info.ischr() else stat.S_IFBLK
        os.mknod(name, kind | 0o600, os.makedev(info.devmajor, info.devminor), dir_fd=directory)
    else:
        raise Damaged(f"{info.name!r}: an entry of the unknown type {info.type!r}")


def _require_ordered(info: tarfile.TarInfo, extents: Sequence[tuple[int, int]]) -> None:
    """Refuse a map of holes that exceeds the size of its file, or that has a byte twice."""
    done = 0
    for offset, length in extents:
        if offset < done or length < 0 or offset + length > info.size:
            raise Damaged(f"{info.name!r}: {length} bytes at {offset} of a file with holes are out of place")
        done = offset + length


def _write(work: _Work, info: tarfile.TarInfo, fd: int) -> None:
    """Write the content of a regular file into it, which is empty."""
    extents = getattr(info, "sparse", None)  # the map of a sparse entry, which has no public name
    _require_ordered(info, [(0, info.size)] if extents is None else extents)
    if extents is None:  # the whole file is data
        work.headers.seek(info.offset_data)
        _copy(work.headers, fd, 0, info.size, work.stopped)
        return
    content = work.archive.extractfile(info)
    if content is None:
        raise Damaged(f"{info.name!r}: a file without content")
    for offset, length in extents:
        content.seek(offset)
        _copy(content, fd, offset, length, work.stopped)
    os.ftruncate(fd, info.size)


def _copy(content: IO[bytes], fd: int, offset: int, length: int, stopped: Callable[[], bool]) -> None:
    while length:
        if stopped():
            raise Stopped
        data = content.read(min(CHUNK, length))
        if not data:
            raise Damaged("unexpected end of data")
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset, length = view[count:], offset + count, length - count


def _set_attributes(work: _Work, info: tarfile.TarInfo, file: str | int) -> None:
    """Set owner, mode, attributes and time, in this order: each of them may clear or change a later one.

    `file` is its descriptor, or a path that leads to it and to nothing else.
    """
    time, powers = mtime_ns(info), work.powers
    os.chown(file, *work.owners(info.uid, info.gid))
    if not info.issym():
        rights = 0 if powers.programs_with_rights or not info.isreg() else stat.S_ISUID | stat.S_ISGID
        os.chmod(file, info.mode & ~rights)  # noqa: PTH101  # no path, or one of the kernel's
    _set_xattrs(info, file, powers, work.owners)
    if not info.isdir():  # in the end
        os.utime(file, ns=(time, time))


def _set_xattrs(info: tarfile.TarInfo, file: str | int, powers: Powers, owners: Owners) -> None:
    """Give the file exactly the attributes of the entry; a directory's default ACL may have added others."""
    wanted = {
        name.removeprefix(XATTR): value.encode(errors="surrogateescape")
        for name, value in info.pax_headers.items()
        if name.startswith(XATTR) and not _is_label(name.removeprefix(XATTR))
    }
    if not powers.programs_with_rights:
        wanted.pop(CAPABILITY, None)
    for name in wanted:
        _require_portable(info, name, powers)
    for name in os.listxattr(file):
        if name not in wanted and not _is_label(name):
            os.removexattr(file, name)
    for name, value in wanted.items():
        os.setxattr(file, name, moved_ids(name, value, owners))


def _is_label(name: str) -> bool:
    """Return whether an attribute is a security module's, such as security.selinux or security.ima."""
    return name.startswith("security.") and name != CAPABILITY


def _require_portable(info: tarfile.TarInfo, name: str, powers: Powers) -> None:
    if name != CAPABILITY and not name.startswith(PORTABLE):
        raise Damaged(f"{info.name!r}: the attribute {name!r} cannot be part of a diff")
    if name.startswith("trusted.") and not powers.trusted_attributes:
        raise Damaged(f"{info.name!r}: the attribute {name!r}, and the new container has no CAP_SYS_ADMIN for it")


def _empty(work: _Work, directory: int) -> None:
    for name in os.listdir(directory):
        _remove(work, _Place(directory, name))


def _remove(work: _Work, place: _Place) -> None:
    """Delete what is there; `linked` may have had it open, or what is in it, as `parent` never does."""
    work.linked.close()
    place.remove()


def _parted(name: str) -> tuple[str, str]:
    """Return the directory of a name and its last part, "." for the top."""
    parts = name.split("/")
    if "" in parts or "." in parts:
        parts = [part for part in parts if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Damaged(f"{name!r}: not a name inside the root filesystem")
    return "/".join(parts[:-1]) or ".", parts[-1] if parts else "."


def _open_parent(top: int, name: str, parent: str) -> int:
    try:
        return beneath.open_directory(top, parent)
    except OSError as error:
        raise Damaged(f"{name!r}: {parent!r} on the way is not a directory ({error.strerror})") from error
