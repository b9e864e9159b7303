"""An agent for the clients' tests: the gRPC services of `kybernate.node.v1`, whose answers a test prepares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import grpc

from kybernate.client.errors import ERROR_KEY
from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc

END_SECONDS = 5.0


class FakeAgent(
    agent_pb2_grpc.InventoryServicer,
    agent_pb2_grpc.ActivityServicer,
    agent_pb2_grpc.OperationsServicer,
    agent_pb2_grpc.CheckpointsServicer,
    agent_pb2_grpc.SeatsServicer,
):
    """Serves on `socket`. Every request is in `requests`; operations and their states are the test's."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.requests: list[Any] = []
        self.containers: list[wire.Container] = []
        self.images: list[wire.Image] = []
        self.seats: list[wire.Seat] = []
        self.turns: list[wire.Turn] = []
        self.operations: dict[str, list[wire.Operation]] = {}  # the states that are still to come, by id
        self.node = wire.Node(name="node-1")
        self.use = wire.ReportActivityResponse(containers=1)
        self.changes: list[wire.Change] = []
        self.log: list[wire.LogLine] = []  # of each container
        self.watch_ends = False  # as if the client's time were over once all changes are sent
        self.watched: list[float] = []  # how many seconds a client had left then
        self.failure: tuple[grpc.StatusCode, wire.Error] | None = None  # of every call
        self.refused: dict[type, tuple[grpc.StatusCode, wire.Error]] = {}  # of calls, by the types of their requests
        self.script: Callable[[str], list[wire.Operation]] = lambda id: []
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None
        self.start()

    def start(self) -> None:
        self._server = self._new_server()
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def serve_tls(self, identity: tuple[bytes, bytes], authority: bytes) -> int:
        """Serve an authority's clients over TCP instead; return the port. `identity`: key, certificate."""
        self.stop()
        self._server = self._new_server()
        credentials = grpc.ssl_server_credentials([identity], authority, require_client_auth=True)
        port: int = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._server.start()
        return port

    def _new_server(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8))
        agent_pb2_grpc.add_InventoryServicer_to_server(self, server)
        agent_pb2_grpc.add_ActivityServicer_to_server(self, server)
        agent_pb2_grpc.add_OperationsServicer_to_server(self, server)
        agent_pb2_grpc.add_CheckpointsServicer_to_server(self, server)
        agent_pb2_grpc.add_SeatsServicer_to_server(self, server)
        return server

    def stop(self) -> None:
        """End as a killed agent does: connections break, the socket stays."""
        assert self._server is not None
        self._server.stop(None).wait(END_SECONDS)

    # -- what a test prepares

    def push(self, state: wire.Operation) -> None:
        """Let an operation get a further state."""
        with self._changed:
            self.operations.setdefault(state.id, []).append(state)
            self._changed.notify_all()

    def _begun(self, verb: str, request: Any, context: grpc.ServicerContext, **fields: str) -> wire.Operation:
        self._answer(request, context)
        known = [one[0] for one in self.operations.values()]
        key = request.options.idempotency_key
        repeated = next((one for one in known if one.idempotency_key == key), None)
        if repeated is not None:
            return repeated
        id = f"op-{len(self.operations) + 1}"
        first = wire.Operation(id=id, verb=verb, state=wire.PENDING, idempotency_key=key, **fields)
        with self._changed:
            self.operations[id] = [first, *self.script(id)]
        return first

    def _answer(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        if (failure := self.failure or self.refused.get(type(request))) is not None:
            self._fail(context, *failure)

    @staticmethod
    def _fail(context: grpc.ServicerContext, code: grpc.StatusCode, error: wire.Error) -> NoReturn:
        context.set_trailing_metadata(((ERROR_KEY, error.SerializeToString()),))
        context.abort(code, error.message)

    # -- operations

    def Checkpoint(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802  # gRPC's name, as all below
        return self._begun("checkpoint", request, context, container=request.name, image=request.path)

    def Restore(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("restore", request, context, container=request.name, image=request.image)

    def Suspend(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("suspend", request, context, container=request.name)

    def Resume(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("resume", request, context, container=request.name)

    def Swap(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("swap", request, context, container=request.leaving, other_container=request.coming)

    def Wake(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("wake", request, context, container=request.name)

    def Sleep(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("sleep", request, context, container=request.name)

    def DeleteImage(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        return self._begun("delete", request, context, image=request.image)

    def GetOperation(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        self._answer(request, context)
        if request.id not in self.operations:
            words = f"no operation has the id {request.id}"
            self._fail(context, grpc.StatusCode.NOT_FOUND, wire.Error(type="Missing", message=words))
        return self.operations[request.id][-1]

    def ListOperations(self, request: Any, context: Any) -> wire.ListOperationsResponse:  # noqa: N802
        self._answer(request, context)
        newest = [states[-1] for states in reversed(self.operations.values())]
        named = [one for one in newest if request.container in ("", one.container, one.container_title)]
        wanted = [one for one in named if not request.states or one.state in request.states]
        return wire.ListOperationsResponse(operations=wanted)

    def CancelOperation(self, request: Any, context: Any) -> wire.Operation:  # noqa: N802
        self._answer(request, context)
        state = wire.Operation()
        state.CopyFrom(self.operations[request.id][-1])
        state.state = wire.CANCELLED
        self.push(state)
        return state

    def WatchOperation(self, request: Any, context: Any) -> Iterator[wire.Operation]:  # noqa: N802
        sent = 0
        while context.is_active():
            with self._changed:
                states = self.operations[request.id]
                if sent == len(states):
                    self._changed.wait(0.05)
                    continue
                state, sent = states[sent], sent + 1
            yield state
            if state.state in (wire.SUCCEEDED, wire.FAILED, wire.CANCELLED):
                return

    # -- inventory and images

    def GetNode(self, request: Any, context: Any) -> wire.Node:  # noqa: N802
        self._answer(request, context)
        return self.node

    def ListContainers(self, request: Any, context: Any) -> wire.ListContainersResponse:  # noqa: N802
        self._answer(request, context)
        found = [one for one in self.containers if not request.namespace or one.namespace == request.namespace]
        return wire.ListContainersResponse(containers=found, revision=1)

    def GetContainer(self, request: Any, context: Any) -> wire.Container:  # noqa: N802
        self._answer(request, context)
        found = [one for one in self.containers if request.name in (one.id, one.title)]
        if not found:
            words = f"no container has the id or the name {request.name!r}"
            self._fail(context, grpc.StatusCode.NOT_FOUND, wire.Error(type="Missing", message=words))
        return found[0]

    def ListSeats(self, request: Any, context: Any) -> wire.ListSeatsResponse:  # noqa: N802
        self._answer(request, context)
        return wire.ListSeatsResponse(seats=[one for one in self.seats if request.all or one.container])

    def GetSeat(self, request: Any, context: Any) -> wire.Seat:  # noqa: N802
        self._answer(request, context)
        found = [one for one in self.seats if request.name in (one.name, one.container, one.container_title)]
        if not found:
            error = wire.Error(type="Missing", message=f"container {request.name} has no seat")
            self._fail(context, grpc.StatusCode.NOT_FOUND, error)
        return found[0]

    def GetSchedule(self, request: Any, context: Any) -> wire.Schedule:  # noqa: N802
        self._answer(request, context)
        return wire.Schedule(turns=self.turns)

    def Watch(self, request: Any, context: Any) -> Iterator[wire.Change]:  # noqa: N802
        self._answer(request, context)
        sent = 0
        while context.is_active():
            with self._changed:
                if sent == len(self.changes):
                    if self.watch_ends:
                        self.watched.append(context.time_remaining())
                        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "as gRPC does when the time is over")
                    self._changed.wait(0.05)
                    continue
                change, sent = self.changes[sent], sent + 1
            yield change

    def ReportActivity(self, request: Any, context: Any) -> wire.ReportActivityResponse:  # noqa: N802
        self._answer(request, context)
        return wire.ReportActivityResponse(
            containers=1, in_flight=self.use.in_flight + request.in_flight, mark=self.use.mark
        )

    def ShareConcurrency(self, requests: Iterator[Any], context: Any) -> Iterator[wire.ConcurrencyShare]:  # noqa: N802
        for request in requests:
            self._answer(request, context)
            yield wire.ConcurrencyShare(container=request.container, granted=request.limit, holders=1)

    def ReadLog(self, request: Any, context: Any) -> Iterator[wire.LogLines]:  # noqa: N802
        self._answer(request, context)
        yield wire.LogLines(lines=self.log[-request.lines :] if request.lines else ())

    def ListImages(self, request: Any, context: Any) -> wire.ListImagesResponse:  # noqa: N802
        self._answer(request, context)
        begin, page = int(request.page_token or 0), 2  # small, so that each list has several
        end = min(len(self.images), begin + page)
        token = str(end) if end < len(self.images) else ""
        return wire.ListImagesResponse(images=self.images[begin:end], next_page_token=token, total=len(self.images))

    def GetImage(self, request: Any, context: Any) -> wire.Image:  # noqa: N802
        self._answer(request, context)
        found = [one for one in self.images if request.image in (one.id, one.name)]
        if not found:
            words = f"no image has the name {request.image!r}"
            self._fail(context, grpc.StatusCode.NOT_FOUND, wire.Error(type="Missing", message=words))
        return found[0]

    def PinImage(self, request: Any, context: Any) -> wire.Image:  # noqa: N802
        self._answer(request, context)
        known = next((one for one in self.images if request.image in (one.id, one.name)), wire.Image())
        return wire.Image(id=request.image, name=known.name, replicas=known.replicas, pinned=request.pinned)

    def LabelImage(self, request: Any, context: Any) -> wire.Image:  # noqa: N802
        self._answer(request, context)
        return wire.Image(id=request.image, labels=request.labels)
