"""Frames: the ten-byte header and what follows it, from and to bytes, however the bytes arrive.

Source: github.com/containerd/ttrpc, PROTOCOL.md.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

HEADER = struct.Struct(">IIBB")  # data length, stream id, kind, flags
MAX_DATA = 4 << 20  # bytes; both sides refuse longer frames
SHOWN_BYTES = 32  # of a frame that is described


class Kind(IntEnum):
    """What a frame carries. Frames of any other kind are legal, and ignored."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3


KNOWN_KINDS = frozenset(Kind)


class Flags(IntFlag):
    """What a frame says about its stream. Frames of a unary call have none."""

    REMOTE_CLOSED = 0x01
    REMOTE_OPEN = 0x02
    NO_DATA = 0x04


class Frame(NamedTuple):
    """One frame. `kind` and `flags` are plain numbers, since those of a peer may be unknown."""

    stream: int
    kind: int
    flags: int
    data: bytes

    def encode(self) -> bytes:
        """Return the bytes on the wire. Raises ValueError beyond MAX_DATA, which no peer would accept."""
        if len(self.data) > MAX_DATA:
            raise ValueError(f"frame of {len(self.data)} bytes, at most {MAX_DATA} are allowed")
        return HEADER.pack(len(self.data), self.stream, self.kind, self.flags) + self.data

    def __str__(self) -> str:
        more = " …" if len(self.data) > SHOWN_BYTES else ""
        begin = f" ({self.data[:SHOWN_BYTES].hex(' ')}{more})" if self.data else ""
        return f"{_header(self.stream, self.kind, self.flags)}, {len(self.data)} bytes{begin}"


class Oversized(NamedTuple):
    """The header of a frame whose data is discarded unread, because `length` is beyond MAX_DATA."""

    stream: int
    kind: int
    flags: int
    length: int

    def __str__(self) -> str:
        return f"{_header(self.stream, self.kind, self.flags)}, {self.length} bytes, at most {MAX_DATA} are allowed"


class FrameReader:
    """Cuts a stream of bytes into frames. Holds one unfinished frame at most: MAX_DATA bytes and a header."""

    __slots__ = ("_buffer", "_skip")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._skip = 0  # bytes of an oversized frame that are still to come

    @property
    def buffered(self) -> int:
        """Return the number of bytes that wait for the rest of their frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame | Oversized]:
        """Return what `data` completes, in order. An Oversized is returned as soon as its header is known."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._buffer += memoryview(data)[skipped:]
        items: list[Frame | Oversized] = []
        position = 0
        while len(self._buffer) - position >= HEADER.size:
            length, stream, kind, flags = HEADER.unpack_from(self._buffer, position)
            start, end = position + HEADER.size, position + HEADER.size + length
            if length > MAX_DATA:
                items.append(Oversized(stream, kind, flags, length))
                self._skip = max(0, end - len(self._buffer))
            elif end <= len(self._buffer):
                items.append(Frame(stream, kind, flags, bytes(self._buffer[start:end])))
            else:
                break
            position = min(end, len(self._buffer))
        del self._buffer[:position]
        return items


def _header(stream: int, kind: int, flags: int) -> str:
    name = Kind(kind).name.lower() if kind in KNOWN_KINDS else f"frame of kind {kind}"
    return f"{name} on stream {stream}, flags {flags:#04x}"
