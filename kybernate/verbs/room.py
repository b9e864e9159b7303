"""Room on the node's GPUs: who may take memory there, and who waits. The interface; the agent has the one owner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

Waiting = Callable[[str], None]


@dataclass(frozen=True)
class Taker:
    """Who wants room: a container, by containerd's namespace and its id, on the GPUs with these UUIDs.

    `gpus` is empty, and `bytes` 0, where that is not known. `operation` wants it, "" for a container that starts.
    `exists`: containerd has the container; it has not the one that a restore is to make.
    """

    namespace: str
    container: str
    gpus: Sequence[str] = ()
    bytes: int = 0
    operation: str = ""
    exists: bool = True


class Room(Protocol):
    """Grants room: the one owner on a node, asked before a container starts and before a verb takes memory."""

    def taken(self, taker: Taker, waiting: Waiting) -> AbstractAsyncContextManager[None]:
        """Wait until the container may take memory on its GPUs, and hold that place while the block takes it.

        `waiting` gets what is waited for, in words, each time that it changes. A block that ends by an error gives the
        place back; otherwise the container has it until it is suspended or ends. Raises Failure.
        """


class OpenRoom:
    """Room without an owner: the first who comes takes it, and the driver refuses what does not fit."""

    @asynccontextmanager
    async def taken(self, taker: Taker, waiting: Waiting) -> AsyncIterator[None]:
        yield


OPEN = OpenRoom()
