"""The headers of a tar file's entries as tarfile has them, those of the usual ones in a fifth of its time.

A restore waits for each of them. What is usual is what `tree_tar` writes in a block: numbers in octal digits, no names
of users and groups, no device. Anything else, be it wrong or not, is parsed by tarfile. Source: pax(1), "ustar
Interchange Format".
"""

from __future__ import annotations

import tarfile
from struct import Struct
from typing import Any, Final, Self

FIELDS: Final = Struct("100s 7sx 7sx 7sx 11sx 11sx 6s 2s 1s 100s")
TERMINATORS: Final = (107, 115, 123, 135, 147)
CHECKSUM: Final = (148, 156)
END: Final = FIELDS.size
REST: Final = tarfile.POSIX_MAGIC.ljust(tarfile.BLOCKSIZE - END, b"\0")
KINDS: Final = frozenset(
    (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.XHDTYPE)
)
BLANK: Final = (CHECKSUM[1] - CHECKSUM[0]) * ord(" ") + sum(REST)  # the field of the checksum counts as spaces


class Entry(tarfile.TarInfo):
    """An entry, for `tarinfo` of tarfile.open()."""

    __slots__ = ()

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the entry of a header's block. Raises tarfile.HeaderError."""
        return cls._usual(buf, encoding, errors) or super().frombuf(buf, encoding, errors)

    @classmethod
    def _frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str, **options: Any) -> Self:
        """Do the same: newer versions of tarfile call this and not frombuf. Their options concern no usual header."""
        found: Self = cls._usual(buf, encoding, errors) or super()._frombuf(buf, encoding, errors, **options)  # type: ignore[misc]
        return found

    @classmethod
    def _usual(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self | None:
        """Return the entry of a usual header, None for any other."""
        if len(buf) != tarfile.BLOCKSIZE or buf[END:] != REST or any(map(buf.__getitem__, TERMINATORS)):
            return None
        name, mode, user, group, size, time, total, after, kind, link = FIELDS.unpack_from(buf)
        if kind not in KINDS or after != b"\0 " or not (mode + user + group + size + time + total).isdigit():
            return None
        entry = cls()
        try:
            entry.mode, entry.uid, entry.gid = int(mode, 8), int(user, 8), int(group, 8)
            entry.size, entry.mtime, entry.chksum = int(size, 8), int(time, 8), int(total, 8)
        except ValueError:  # digits that are not octal
            return None
        if entry.chksum != sum(buf[: CHECKSUM[0]]) + sum(buf[CHECKSUM[1] : END]) + BLANK:
            return None
        entry.type = kind
        entry.name = name.partition(b"\0")[0].decode(encoding, errors)
        entry.linkname = link.partition(b"\0")[0].decode(encoding, errors)
        if entry.isdir():
            entry.name = entry.name.rstrip("/")
        return entry
