"""Files of a tree as the entries of a tar file in pax form, with nothing lost that a container could see.

Times have nanoseconds, and extended attributes, hard links, devices and holes are kept; sockets are not, since no
process could listen on them. The entries are written without tarfile's copies: a checkpoint waits for them.
Sources: pax(1), "pax Extended Header"; GNU tar's manual, "Storing Sparse Files".
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from kybernate_shim.checkpoint.image.store import require_space
from kybernate_shim.errors import Refused
from kybernate_shim.linux.beneath import FirstNames, TreeFile, tree_changed

XATTR: Final = "SCHILY.xattr."
MOST_HEADER: Final = 4 << 20  # bytes of an entry's names, map of holes, and attributes, which are MOST_ATTRIBUTES
MOST_EXTENTS: Final = 70_000  # their map is at most 40 bytes each; a file with more is written with its holes filled
UNASKED: Final = 16 << 20  # bytes of a file up to which the disk's room is not examined
BLOCK: Final = tarfile.BLOCKSIZE
ENTRY_BYTES: Final = 3 * BLOCK  # of an entry without attributes: the header, and one of pax with its records
CHUNK: Final = 256 << 10
MTIME: Final = "mtime"
LONGEST: Final = 100  # bytes of a name, or of where a link leads, in a block of ustar
MOST_ID: Final = 0o7777777  # a user or a group there
MOST_SIZE: Final = 0o77777777777
MAGIC_SUM: Final = sum(tarfile.POSIX_MAGIC) + 8 * ord(" ")  # a checksum's own field counts as spaces
KINDS: Final = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}
ENCODING: Final = "utf-8"  # for names; other bytes in them pass through, as Python does it everywhere


@dataclass
class TreeTar:
    """A tar file that is being written to `stream`, on the disk of `directory`.

    `check` is called before each piece, and ends the work by what it raises. `entries` are of all kinds,
    `file_bytes` those of regular files, `data_bytes` without their holes, `bytes` all that was written. With
    `changing`, a file that becomes shorter is filled up with zeros, as its size was written by then.
    """

    stream: BinaryIO
    directory: Path
    check: Callable[[], None] = lambda: None
    entries: int = 0
    file_bytes: int = 0
    data_bytes: int = 0
    changing: bool = False
    _first: FirstNames = field(default_factory=FirstNames)

    def add(self, found: TreeFile, attributes: Mapping[str, bytes]) -> None:
        """Add a file of any kind but a socket, with its content.

        Raises Refused, OSError, and NoRoom before a file that does not fit on the disk.
        """
        status = found.status
        info = _describe(found, attributes)
        if (first := self._first.of(found)) != found.name:
            info.type, info.linkname, info.size = tarfile.LNKTYPE, first, 0
        self.entries += 1
        self.file_bytes += info.size
        extents = [(0, info.size)] if info.size else []
        index = b""
        if status.st_blocks * BLOCK < info.size and (data := _extents_of(found.fd, info.size)):
            extents, index = data, _make_sparse(info, data)
        if info.size > UNASKED:
            require_space(self.directory, info.size, what="container's files")
        self.stream.write(_header(info) + index)
        for offset, length in extents:
            self.data_bytes += length
            self._copy(found, offset, length)
        self.stream.write(bytes(-info.size % BLOCK))

    @property
    def bytes(self) -> int:
        return self.stream.tell()

    def mark(self, name: str) -> None:
        """Add an empty file of mode 0, which stands for something else."""
        info = tarfile.TarInfo(name)
        info.mode = 0
        self.stream.write(_header(info))
        self.entries += 1

    def finish(self) -> None:
        """Write the end."""
        self.stream.write(bytes(2 * BLOCK))
        self.stream.write(bytes(-self.stream.tell() % tarfile.RECORDSIZE))

    def _copy(self, found: TreeFile, offset: int, length: int) -> None:
        while length:
            self.check()
            data = os.pread(found.fd, min(CHUNK, length), offset)
            if not data and self.changing:
                data = bytes(min(CHUNK, length))
            elif not data:
                raise tree_changed(found.name, "made shorter while the tree was read")
            self.stream.write(data)
            offset, length = offset + len(data), length - len(data)


def decimal_seconds(nanoseconds: int) -> str:
    """Return a time as pax wants it: seconds with nine digits after the point."""
    sign = "-" if nanoseconds < 0 else ""
    return f"{sign}{abs(nanoseconds) // 10**9}.{abs(nanoseconds) % 10**9:09d}"


def _header(info: tarfile.TarInfo) -> bytes:
    """Return the headers of an entry: those of the usual ones in a fifth of tarfile's time, as the container waits."""
    name = f"{info.name}/" if info.isdir() else info.name
    usual = (
        info.pax_headers.keys() <= {MTIME}
        and name.isascii()
        and info.linkname.isascii()
        and max(len(name), len(info.linkname)) <= LONGEST
        and max(info.uid, info.gid) <= MOST_ID
        and info.size <= MOST_SIZE
        and not (info.ischr() or info.isblk())
    )
    if not usual:
        return info.tobuf(tarfile.PAX_FORMAT, ENCODING, "surrogateescape")
    head = _ustar(info.type, name.encode(), info.size, info.linkname.encode(), (info.mode, info.uid, info.gid))
    if MTIME not in info.pax_headers:
        return head
    record = _record(MTIME.encode(), info.pax_headers[MTIME].encode())
    return _head_of_record(len(record)) + record.ljust(BLOCK, b"\0") + head


@cache
def _head_of_record(size: int) -> bytes:
    """Return the block before a record of `size` bytes, which nearly all entries have alike."""
    return _ustar(tarfile.XHDTYPE, b"././@PaxHeader", size)


def _record(key: bytes, value: bytes) -> bytes:
    """Return a record of pax of less than 100 bytes; they begin with their own length."""
    size = len(key) + len(value) + 5
    return b"%d %b=%b\n" % (size, key, value)


def _ustar(kind: bytes, name: bytes, size: int, link: bytes = b"", rights: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    """Return one block, without a time; `rights` are mode, user and group. Source: pax(1)."""
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (*rights, size, 0)
    total = sum(name) + sum(numbers) + sum(kind) + sum(link) + MAGIC_SUM
    after = kind + link.ljust(LONGEST, b"\0") + tarfile.POSIX_MAGIC
    return (b"%b%b%06o\0 %b" % (name.ljust(LONGEST, b"\0"), numbers, total, after)).ljust(BLOCK, b"\0")


def _describe(found: TreeFile, attributes: Mapping[str, bytes]) -> tarfile.TarInfo:
    status = found.status
    info = tarfile.TarInfo(found.name)
    info.type = KINDS[stat.S_IFMT(status.st_mode)]
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid, info.gid = status.st_uid, status.st_gid
    info.size = status.st_size if info.isreg() else 0
    if info.issym():
        info.linkname = found.link()
    if info.ischr() or info.isblk():
        info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
    if odd := next((name for name in attributes if "=" in name), None):
        raise Refused(f"/{found.name}: the attribute {odd!r} has a name that a tar file cannot hold")
    # The time is written by hand, since a float has not enough digits for nanoseconds.
    info.pax_headers = {
        MTIME: decimal_seconds(status.st_mtime_ns),
        **{XATTR + key: value.decode(errors="surrogateescape") for key, value in attributes.items()},
    }
    return info


def _extents_of(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the stretches of data, none where they are too many for a map."""
    extents = list(islice(data_of(fd, size), MOST_EXTENTS + 1))
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


def data_of(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each stretch of data, and the file's end as an empty one, as GNU tar does.

    All within `size`, whatever becomes of the file meanwhile.
    """
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(fd, offset, os.SEEK_DATA)
            end = min(size, os.lseek(fd, begin, os.SEEK_HOLE))
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data after this offset, or the file ends before it by now
                raise
            break
        if begin >= size:
            break  # it has become longer
        yield begin, end - begin
        offset = end
    yield size, 0
