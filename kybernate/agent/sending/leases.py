"""Which images are open for other agents, for whom, and until when. The event loop's alone.

An image that is open is not removed. A reader that is gone without notice holds it for LASTS_SECONDS after its last
read.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kybernate.agent.sending.opened import OpenedImage
from kybernate.node.failure import Exhausted, Missing

LASTS_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 5.0
MOST_OPEN: Final = 32  # by one certificate


@dataclass
class Lease:
    """An image that is open for a caller, by the key of its limits."""

    image: OpenedImage
    caller: str
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    used: float = 0.0
    readers: int = 0
    ended: bool = False
    sent_bytes: int = 0


class Leases:
    """All of them. `clock` returns seconds."""

    def __init__(self, log: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._known: dict[str, Lease] = {}

    def add(self, image: OpenedImage, caller: str) -> Lease:
        """Take over an image for a caller. Raises Exhausted; the image stays the caller's to close then."""
        if sum(one.caller == caller for one in self._known.values()) >= MOST_OPEN:
            raise Exhausted(
                f"{caller} has {MOST_OPEN} images open",
                state="nothing was opened",
                advice="close those that are not read any more; they close by themselves after a minute",
            )
        lease = Lease(image, caller, used=self._clock())
        self._known[lease.token] = lease
        return lease

    @contextmanager
    def reading(self, token: str, caller: str) -> Iterator[Lease]:
        """Give a lease that does not end while the block runs. Raises Missing."""
        lease = self._of(token, caller)
        lease.readers += 1
        try:
            yield lease
        finally:
            lease.readers -= 1
            lease.used = self._clock()
            if lease.ended and not lease.readers:
                lease.image.close()

    def end(self, token: str, caller: str) -> None:
        """End a lease; one that is not there is fine. Files that are being read are closed after that."""
        try:
            self._end(self._of(token, caller))
        except Missing:
            return

    async def run(self) -> None:
        """End those that are not read any more, until cancelled; then all."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self.end_unused()
        finally:
            for lease in tuple(self._known.values()):
                self._end(lease)

    def end_unused(self) -> None:
        """End those of which nothing was read for LASTS_SECONDS."""
        oldest = self._clock() - LASTS_SECONDS
        for lease in tuple(self._known.values()):
            if not lease.readers and lease.used < oldest:
                self._end(lease)

    def _of(self, token: str, caller: str) -> Lease:
        lease = self._known.get(token)
        if lease is None or lease.caller != caller:
            raise Missing("no image is open under this token")
        return lease

    def _end(self, lease: Lease) -> None:
        del self._known[lease.token]
        lease.ended = True
        if not lease.readers:
            lease.image.close()
        self._log.info(
            "image.sent", image=str(lease.image.directory), id=lease.image.manifest.id, bytes=lease.sent_bytes,
            caller=lease.caller,
        )  # fmt: skip
