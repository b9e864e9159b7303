"""Frames: four bytes with the length of a message, big-endian, and the message. From and to bytes, without I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kybernate_shim.worker_protocol.errors import MessageInvalid

HEADER = struct.Struct(">I")
# Bytes of a message. The largest names the blocks and holes of a container's files in the arena: its manifest has them,
# too, and at most 32 MiB. The first byte of a longer one would be below any letter's, so text is no frame.
MOST_BYTES = 64 << 20
SHOWN_BYTES = 32  # of what is not a frame


def framed(message: bytes) -> bytes:
    """Return a message as it is sent. Raises MessageInvalid."""
    if len(message) > MOST_BYTES:
        raise MessageInvalid(f"a message of {len(message)} bytes, at most {MOST_BYTES} are allowed")
    return HEADER.pack(len(message)) + message


class MessageReader:
    """Cuts a stream of bytes into messages. Holds one unfinished frame at most."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """Return the number of bytes that wait for the rest of their frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that `data` completes, in order. Raises MessageInvalid as soon as a header is invalid.

        Nothing more can be read from the stream then.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > MOST_BYTES:
                raise MessageInvalid(f"no frame of a worker's protocol: {bytes(self._buffer[:SHOWN_BYTES])!r}")
            end = HEADER.size + size
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield message
