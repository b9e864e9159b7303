"""A shim's socket in this process: real ttrpc in a thread, the service `kybernate.shim.v1.Shim` from a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from google.protobuf.message import Message

from kybernate.node.shim import SERVICE
from kybernate_shim.address import listen, socket_path
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Server

REQUESTS: dict[str, type[Message]] = {
    "Checkpoint": wire.CheckpointRequest,
    "Release": wire.ReleaseRequest,
    "Suspend": wire.SuspendRequest,
    "Resume": wire.ResumeRequest,
    "Cancel": wire.CancelRequest,
    "Status": wire.StatusRequest,
}


NOTHING_RUNS = RpcError(Code.FAILED_PRECONDITION, "no operation runs")


class FakeShim:
    """Answers with `answers[method]`, an error or a message; remembers `requests`. `service` may be another one's name.

    An operation is answered only after `watched` looks at the status, as one that takes its time.
    """

    def __init__(self, address: str, namespace: str, group: str, *, service: str = SERVICE) -> None:
        self.containers: dict[str, wire.Container] = {}
        self.answers: dict[str, Message | RpcError] = {"Cancel": NOTHING_RUNS}
        self.requests: list[Any] = []
        self.watched = 0
        self._looks = 0
        self._watched_enough = asyncio.Event()
        self._path = socket_path(address, namespace, group)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        listener = listen(self._path)
        assert listener is not None
        self._server = Server(
            {service: {name: Method(request, self._handler(name)) for name, request in REQUESTS.items()}}
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._server.start(listener)).result(10)

    def add(self, id: str, **fields: Any) -> None:
        self.containers[id] = wire.Container(id=id, **{"state": "running", "pid": 4242} | fields)

    def close(self) -> None:
        self._run(self._server.close(grace=0)).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._path.unlink(missing_ok=True)

    def _run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _handler(self, name: str) -> Callable[[Any, Call], Awaitable[Message]]:
        async def status(request: wire.StatusRequest, call: Call) -> Message:
            self._looks += 1
            if self._looks >= self.watched:
                self._watched_enough.set()
            wanted = [one for id, one in self.containers.items() if request.id in ("", id)]
            if request.id and not wanted:
                raise RpcError(Code.NOT_FOUND, f"container {request.id}: not found")
            return wire.StatusResponse(containers=wanted)

        async def operation(request: Message, call: Call) -> Message:
            self.requests.append(request)
            if self.watched:
                await self._watched_enough.wait()
            answer = self.answers[name]
            if isinstance(answer, RpcError):
                raise answer
            return answer

        return status if name == "Status" else operation
