"""Connections that have not shown yet who they are, or what they want: how many, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kybernate.node.failure import Refused


@dataclass
class Pending:
    """Those that wait, in the order in which they came.

    Others may share an address with a client that opens connections without end. So one that is too much is not
    refused: it takes the place of the oldest, which had the most time.
    """

    most: int = 256  # of all keys
    _since: dict[asyncio.Timeout, str] = field(default_factory=dict)

    @asynccontextmanager
    async def one(self, key: str, limit: int, seconds: float) -> AsyncIterator[None]:
        """Let the block run for `seconds`, or until its place is taken by a newer one. Raises Refused."""
        same = [timeout for timeout, other in self._since.items() if other == key]
        self._end_oldest(same, limit)
        self._end_oldest(list(self._since), self.most)
        mine = asyncio.timeout(seconds)
        try:
            async with mine:
                self._since[mine] = key
                yield
        except TimeoutError:
            why = f"had not ended within {seconds:g} s" if mine in self._since else "gave way to newer ones"
            raise Refused(f"one of the {key} {why}") from None
        finally:
            self._since.pop(mine, None)

    def end_all(self) -> None:
        """End all blocks."""
        for one in list(self._since):
            self._end(one)

    def _end_oldest(self, those: Sequence[asyncio.Timeout], limit: int) -> None:
        for oldest in those[: max(0, len(those) + 1 - limit)]:
            self._end(oldest)

    def _end(self, one: asyncio.Timeout) -> None:
        del self._since[one]
        if not one.expired():
            one.reschedule(asyncio.get_running_loop().time())
