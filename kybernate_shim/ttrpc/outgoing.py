"""The queue of bytes that a peer has not read yet, for either end of a connection.

asyncio's transport keeps each piece that it cannot send and adds up the sizes of all of them at every further one, so
that the cost of a slow peer would grow with the square of its unread bytes. The pieces are joined here instead, and the
transport never has more than one of them.
"""

from __future__ import annotations

import asyncio

MAX_UNSENT = 16 << 20  # bytes that wait for a peer to read them


class Outgoing:
    """The frames for one peer, in order. A peer that leaves more than MAX_UNSENT bytes unread is disconnected."""

    __slots__ = ("_full", "_transport", "_waiting")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting = bytearray()
        self._full = False
        transport.set_write_buffer_limits(high=0)  # so `pause` is called at the first byte that cannot be sent

    def write(self, frame: bytes) -> None:
        """Send a frame, now or when the peer has read the earlier ones."""
        if self._transport.is_closing():
            return
        if self._full:
            self._waiting += frame
        else:
            self._transport.write(frame)
        if len(self._waiting) + self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._transport.abort()

    def pause(self) -> None:
        """Keep further frames: the transport has taken a piece that it could not send."""
        self._full = True

    def resume(self) -> None:
        """Send what has been kept: the transport is empty."""
        self._full = False
        self._hand_over()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._hand_over()
        self._transport.close()

    def _hand_over(self) -> None:
        if self._waiting and not self._transport.is_closing():
            waiting, self._waiting = self._waiting, bytearray()
            self._transport.write(waiting)
