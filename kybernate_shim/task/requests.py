"""The requests for operations on one container: each name is carried out once, however often it is requested.

A client whose connection broke asks again by the same name, and gets the answer of what it has begun: waiting for it,
or later. What was refused before it began is forgotten, so that the same name can be tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from kybernate_shim.errors import Cancelled, Taken
from kybernate_shim.task.codes import rpc_error
from kybernate_shim.task.outcomes import Ledger, Outcome
from kybernate_shim.ttrpc import RpcError

PATIENCE = ("timeout_seconds", "timeout_ms", "room_timeout_ms")  # a repetition may have less of it left

Answer = Message | RpcError


@dataclass(eq=False)
class NamedRequest:
    """What a client has asked for under the name `id`, which may be empty. `wanted` is all of it that matters."""

    id: str
    verb: str
    wanted: bytes
    began: float = field(default_factory=time.monotonic)
    cancelled_by: str = ""
    started: bool = False  # a task that is cancelled before its first step runs none of its code
    begun: bool = False  # what it asks for; else it waits for its container to be free
    outcome: Outcome | None = None  # of one that was cancelled before it began
    task: asyncio.Task[Answer] = field(init=False)

    async def answer(self) -> Message:
        """Wait for the end; a caller that does not wait for it any more changes nothing. Raises RpcError."""
        found = await asyncio.shield(self.task)
        if isinstance(found, RpcError):
            raise RpcError(found.code, found.message)
        return found

    async def cancel(self, by: str) -> Outcome:
        """End a request that waits for its container to be free."""
        if not self.cancelled_by:
            self.cancelled_by = by
            if self.started:
                self.task.cancel()
        await asyncio.wait({self.task})
        assert self.outcome is not None
        return self.outcome


class Requests:
    """The requests of container `id` that run, and the answers of those that the `ledger` knows to have ended."""

    def __init__(self, id: str, ledger: Ledger) -> None:
        self._id = id
        self._ledger = ledger
        self._open: list[NamedRequest] = []
        self._ended: dict[str, NamedRequest] = {}

    @property
    def waiting(self) -> list[NamedRequest]:
        """Those whose operation has not begun."""
        return [request for request in self._open if not request.begun]

    def begin_by(self, task: asyncio.Task[Any] | None) -> None:
        """Note that the operation has begun which the request of this task is about, if it is one's."""
        for request in self._open:
            request.begun = request.begun or request.task is task

    async def once(self, id: str, verb: str, wanted: Message, work: Callable[[], Awaitable[Message]]) -> Message:
        """Do `work` unless the operation `id` runs or has ended, and return its answer.

        Raises RpcError, the same for each caller, and Taken.
        """
        request = NamedRequest(id, verb, _content(wanted))
        if (known := self._find(id)) is not None:
            if (known.verb, known.wanted) != (request.verb, request.wanted):
                raise Taken(f"operation {id} of container {self._id} is another {known.verb}: the {verb} was not begun")
            return await known.answer()
        request.task = asyncio.ensure_future(self._carry_out(request, work))
        self._open.append(request)
        return await request.answer()

    def _find(self, id: str) -> NamedRequest | None:
        running = next((request for request in self._open if request.id == id), None)
        return (running or self._ended.get(id)) if id else None

    async def _carry_out(self, request: NamedRequest, work: Callable[[], Awaitable[Message]]) -> Answer:
        request.started = True
        try:
            if request.cancelled_by:
                return self._cancelled(request)
            return await work()
        except asyncio.CancelledError:
            if not request.cancelled_by:
                raise
            return self._cancelled(request)
        except Exception as error:  # noqa: BLE001  # it is the answer of every caller
            return rpc_error(error)
        finally:
            self._close(request)

    def _cancelled(self, request: NamedRequest) -> RpcError:
        answer = rpc_error(
            Cancelled(
                f"{request.verb} of container {self._id} was cancelled by {request.cancelled_by} before it began;"
                " nothing was changed"
            )
        )
        now = time.monotonic()
        waited = now - request.began
        request.outcome = Outcome(
            request.id, request.verb, "cancelled", now, waited, code=answer.code.name, error=answer.message
        )
        self._ledger.add(request.outcome)
        return answer

    def _close(self, request: NamedRequest) -> None:
        """Keep what the ledger knows: an operation that has begun, or was cancelled before."""
        self._open.remove(request)
        if request.id:
            self._ended[request.id] = request
        self._ended = {id: one for id, one in self._ended.items() if self._ledger.find(id) is not None}


def _content(wanted: Message) -> bytes:
    """Return a request without what a repetition of it may have changed."""
    copy = type(wanted)()
    copy.CopyFrom(wanted)
    for name in PATIENCE:
        if name in copy.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return copy.SerializeToString(deterministic=True)
