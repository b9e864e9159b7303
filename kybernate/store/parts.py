"""The bytes of a part of an object as they are read: in order, a chunk at a time.

What is taken chunk by chunk is compared and written while it is in the CPU's cache, and a request needs the memory of a
chunk, not of all its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from kybernate.store.in_thread import in_thread

T = TypeVar("T")


class Part(Protocol):
    """The bytes of a part that have not been taken yet."""

    def take(self, size: int) -> memoryview:
        """Return the next bytes, fewer where the object ends. They stay as they are until the next call. Blocks.

        Raises PartBroken.
        """


class PartBroken(Exception):
    """The rest of a part does not come any more. What was taken is right."""


class WholePart:
    """A part of which all bytes are in memory."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._left = memoryview(content)

    def take(self, size: int) -> memoryview:
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class WholeParts:
    """What a service's client needs of its own to read parts: `get_range`."""

    async def get_range(self, name: str, start: int, length: int) -> bytes | memoryview:
        raise NotImplementedError

    async def read_range(self, name: str, start: int, length: int, work: Callable[[Part], T]) -> T:
        """Return what `work` returns, in a thread, of a part that it takes. Raises ObjectMissing and PartBroken.

        A cancelled caller waits until `work` has ended.
        """
        return await in_thread(work, WholePart(await self.get_range(name, start, length)))
