"""Tar archives as streams: written so that equal entries are equal bytes, read so that no header is believed.

`tarfile` reads extended headers of any size into memory, and knows links, devices and sparse files. An exported image
has none of them, so the reader here knows plain files and directories alone.
Source: POSIX.1-2017 pax, "ustar interchange format".
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kybernate.export.documents import ArtefactInvalid
from kybernate.export.entries import Entry
from kybernate_shim.linux.private_files import DIRECTORY_MODE, FILE_MODE

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
MOST_EXTENDED = 64 << 10  # bytes of an extended header: it has a name and a size
MOST_RECORDS = 64  # in it
MOST_EXTENDED_BYTES = 64 << 20  # of an archive
EXTENDED = (tarfile.XHDTYPE,)
IGNORED = (tarfile.XGLTYPE,)  # what some programs note about an archive as a whole
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
SPACE = ord(" ")

Read = Callable[[int], bytes]


def archived(entries: Iterable[Entry]) -> Iterator[bytes | memoryview]:
    """Yield the archive of the entries: root's own, without times."""
    for entry in entries:
        yield header(entry.name, entry.size, directory=entry.is_directory)
        yield from entry.pieces()
        yield bytes(-entry.size % BLOCK)
    yield END


def archive_bytes(entries: Iterable[Entry]) -> int:
    """Return how long `archived` is."""
    return sum(
        len(header(one.name, one.size, directory=one.is_directory)) + one.size + -one.size % BLOCK for one in entries
    ) + len(END)


def header(name: str, size: int, *, directory: bool = False, long_size: bool = False) -> bytes:
    """Return the header of a member. With `long_size`, it is one block for any size, by an extension of GNU's."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, FILE_MODE
    if directory:
        info.type, info.mode = tarfile.DIRTYPE, DIRECTORY_MODE
    return info.tobuf(tarfile.GNU_FORMAT if long_size else tarfile.PAX_FORMAT)


@dataclass(frozen=True)
class Member:
    """A member of an archive that is read. Its content is read before the next member is."""

    name: str
    size: int
    is_directory: bool


def members(read: Read) -> Iterator[Member]:
    """Yield the members of the archive that `read` gives exactly as many bytes of as it is called for, "" at its end.

    After a file, the caller reads its content with `read`, and `members` the padding. Raises ArtefactInvalid.
    """
    extended: dict[str, str] = {}
    left = MOST_EXTENDED_BYTES
    while (block := read(BLOCK)) and any(block):
        info = _header(block)
        if info.type in EXTENDED or info.type in IGNORED:
            content = _content(info, read)
            left -= BLOCK + len(content)
            if left < 0:
                raise ArtefactInvalid(f"more than {MOST_EXTENDED_BYTES} bytes of extended headers")
            extended = _records(content) if info.type in EXTENDED else extended
            continue
        member = _member(info, extended)
        extended = {}
        yield member
        read(-member.size % BLOCK)


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise ArtefactInvalid(f"not a tar archive: {error}") from error


def _member(info: tarfile.TarInfo, extended: dict[str, str]) -> Member:
    name, size = extended.get("path", info.name), extended.get("size", str(info.size))
    name = name.removeprefix("./").rstrip("/")
    if info.type == tarfile.DIRTYPE:
        return Member(name, 0, is_directory=True)
    if info.type not in FILES or any(key.startswith("GNU.sparse") for key in extended):
        raise ArtefactInvalid(f"{name!r} is neither a plain file nor a directory")
    if not (size.isascii() and size.isdigit() and len(size) < 18):
        raise ArtefactInvalid(f"{name!r} has the size {size[:40]!r}")
    return Member(name, int(size), is_directory=False)


def _content(info: tarfile.TarInfo, read: Read) -> bytes:
    if not 0 <= info.size <= MOST_EXTENDED:
        raise ArtefactInvalid(f"an extended header of {info.size} bytes, at most {MOST_EXTENDED} are accepted")
    return read(info.size + -info.size % BLOCK)[: info.size]


def _records(content: bytes) -> dict[str, str]:
    """Return the records `LENGTH KEY=VALUE` of an extended header."""
    records: dict[str, str] = {}
    begin = 0
    while begin < len(content):
        digits = content[begin : begin + 9].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        end = begin + length
        if not len(digits) + 2 < length or end > len(content) or content[begin + len(digits)] != SPACE:
            raise ArtefactInvalid("an extended header that cannot be read")
        key, _, value = content[begin + len(digits) + 1 : end - 1].partition(b"=")
        records[key.decode(errors="surrogateescape")] = value.decode(errors="surrogateescape")
        if len(records) > MOST_RECORDS:
            raise ArtefactInvalid(f"an extended header of more than {MOST_RECORDS} records")
        begin = end
    return records
