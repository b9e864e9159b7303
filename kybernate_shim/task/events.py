"""Task events for containerd: one queue, one sender, in the order in which they happened.

containerd may be away for a restart or an upgrade. The head of the queue is then sent again until containerd answers,
so that events keep their order and none is lost while the queue has room.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from google.protobuf.message import Message

from kybernate_shim.errors import Refused
from kybernate_shim.logs import Log
from kybernate_shim.messages import event_service_pb2 as wire
from kybernate_shim.messages.any import pack
from kybernate_shim.ttrpc import Client, RpcError

SERVICE = "containerd.services.events.ttrpc.v1.Events"
QUEUE_LIMIT = 2048  # as containerd's own shim
CALL_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
REFUSALS = 5  # an event that a living containerd refuses this often is dropped, so that it cannot block the rest

Forward = Callable[[wire.ForwardRequest], Awaitable[None]]


class _Queued(NamedTuple):
    topic: str
    request: wire.ForwardRequest


class Publisher:
    """Sends events of one namespace. `forward` delivers one; it raises OSError while containerd is away."""

    def __init__(self, namespace: str, forward: Forward, log: Log) -> None:
        self._namespace = namespace
        self._forward = forward
        self._log = log
        self._queue: deque[_Queued] = deque()
        self._sender: asyncio.Task[None] | None = None

    def publish(self, topic: str, event: Message) -> None:
        """Queue `event`. Never blocks; beyond 2048 waiting events the oldest is dropped, which is logged."""
        request = wire.ForwardRequest()
        request.envelope.timestamp.FromNanoseconds(time.time_ns())
        request.envelope.namespace = self._namespace
        request.envelope.topic = topic
        request.envelope.event.CopyFrom(pack(event))
        self._queue.append(_Queued(topic, request))
        if len(self._queue) > QUEUE_LIMIT:
            self._log.error("event.dropped", topic=self._queue.popleft().topic, error="queue is full")
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send())

    async def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty; return False when it is not after `timeout` seconds."""
        if self._sender is None:
            return True
        done, _ = await asyncio.wait([self._sender], timeout=timeout)
        return bool(done)

    async def _send(self) -> None:
        pause, refusals = FIRST_PAUSE, 0
        while self._queue:
            head = self._queue[0]
            try:
                await self._forward(head.request)
            except Refused as error:
                refusals += 1
                if refusals >= REFUSALS:
                    self._log.error("event.dropped", topic=head.topic, error=str(error))
                    self._drop(head)
                    refusals = 0
                    continue
            except OSError as error:
                self._log.debug("event.delayed", topic=head.topic, error=str(error))
            else:
                self._drop(head)
                pause, refusals = FIRST_PAUSE, 0
                continue
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _drop(self, head: _Queued) -> None:
        if self._queue and self._queue[0] is head:  # a full queue may have dropped it meanwhile
            self._queue.popleft()


class Forwarder:
    """Delivers one event at a time over a kept connection to containerd's ttrpc socket."""

    def __init__(self, path: str, namespace: str) -> None:
        self._path = path.removeprefix("unix://")
        self._metadata = {"containerd-namespace-ttrpc": namespace}
        self._client: Client | None = None

    async def __call__(self, request: wire.ForwardRequest) -> None:
        """Deliver `request`; a containerd without a ttrpc socket wants no events.

        Raises OSError while containerd does not answer, Refused when containerd answers with an error.
        """
        if not self._path:
            return
        from google.protobuf.empty_pb2 import Empty

        try:
            if self._client is None or self._client.closed:
                self._client = await Client.connect(self._path, metadata=self._metadata, timeout=CALL_SECONDS)
            await self._client.call(SERVICE, "Forward", request, Empty, timeout=CALL_SECONDS)
        except RpcError as error:
            if self._client is None or self._client.closed:
                raise ConnectionError(str(error)) from error
            raise Refused(str(error)) from error
        except TimeoutError as error:
            raise ConnectionError(f"{self._path}: no answer in {CALL_SECONDS:g} s") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
