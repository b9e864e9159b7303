"""What a peer leaves unread: kept in order, in one piece, and not without end."""

from __future__ import annotations

import asyncio

from kybernate_shim.ttrpc.outgoing import MAX_UNSENT, Outgoing


class Transport(asyncio.Transport):
    """Takes `room` bytes, then keeps pieces and says so to its protocol, as asyncio's does."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.sent = bytearray()
        self.pieces: list[bytes] = []
        self.closing = self.aborted = False
        self.outgoing = Outgoing(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.pieces))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        now = bytes(data[: self.room]) if not self.pieces else b""
        self.room -= len(now)
        self.sent += now
        if len(now) < len(data):
            self.pieces.append(bytes(data[len(now) :]))
            self.outgoing.pause()

    def read(self, room: int) -> None:
        """Let the peer read so much more."""
        self.room += room
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            self.write(piece)
        if not self.pieces:
            self.outgoing.resume()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


def test_outgoing_keeps_order_and_one_piece() -> None:
    transport = Transport(room=5)
    frames = [b"%05d" % number for number in range(1000)]
    for frame in frames:
        transport.outgoing.write(frame)
        assert len(transport.pieces) <= 1, "the transport adds up its pieces at each write"
    assert bytes(transport.sent) == frames[0]
    transport.read(12)
    transport.outgoing.write(b"after")
    assert len(transport.pieces) == 1
    transport.read(1 << 20)
    transport.read(1 << 20)
    assert bytes(transport.sent) == b"".join(frames) + b"after"


def test_outgoing_ends_a_peer_that_does_not_read() -> None:
    transport = Transport(room=0)
    transport.outgoing.write(b"x" * (MAX_UNSENT - 1))
    assert not transport.aborted
    transport.outgoing.write(b"xx")
    assert transport.aborted
    transport.outgoing.write(b"ignored")
    assert transport.get_write_buffer_size() < MAX_UNSENT


def test_outgoing_closes_after_what_waits() -> None:
    transport = Transport(room=0)
    for frame in (b"one", b"two", b"three"):
        transport.outgoing.write(frame)
    transport.outgoing.close()
    transport.read(100)
    assert bytes(transport.sent) == b"onetwothree"
    assert transport.closing
