"""Listens for Envoy, and is the brain that its conversations ask: this proxy's router, engine and callers."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any, Final

import grpc
import grpc.aio

from kybernate.messages import ext_proc_pb2 as wire
from kybernate.messages import ext_proc_pb2_grpc as service
from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.document import unusable
from kybernate.proxy.engine import Admission, Engine, Refused
from kybernate.proxy.ext_proc import answers
from kybernate.proxy.ext_proc.conversation import Conversation
from kybernate.proxy.holding import Phase
from kybernate.proxy.models import place_of
from kybernate.proxy.models_list import listed
from kybernate.proxy.record import LastWake, Observer, Record
from kybernate.proxy.routing import Decision, Head, ListModels, ToModel, probe_for
from kybernate.proxy.rules import Rules
from kybernate.proxy.settings import Peer, Route

MOST_STREAMS: Final = 1 << 14  # requests that Envoy asks about at one time; each is a task and one buffer
KEPT_SECONDS: Final = 5.0  # that an address of a name counts
OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 30_000),  # an Envoy whose machine is gone holds no request
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
)
BUSY: Final = Refusal(503, "queue_full", f"{MOST_STREAMS} requests are asked about, which is as many as may", 1.0)


class ExtProcPort(service.ExternalProcessorServicer):
    """The door for Envoy."""

    def __init__(
        self,
        rules: Rules,
        engine: Engine,
        observer: Observer,
    ) -> None:
        self.limits = rules.settings.limits
        self._rules, self._engine, self._observer = rules, engine, observer
        self._streams = 0
        self._places: dict[str, tuple[str, float]] = {}
        most = max(self.limits.filtered, 1 << 20) + (1 << 16)
        self._server = grpc.aio.server(options=[*OPTIONS, ("grpc.max_receive_message_length", most)])
        service.add_ExternalProcessorServicer_to_server(self, self._server)

    async def start(self, address: str) -> int:
        """Listen at HOST:PORT or unix:PATH, and return the port. Raises Invalid."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise unusable(f"ext_proc: {address} cannot be listened on: {error}") from error
        await self._server.start()
        return port

    async def close(self, drain: float) -> None:
        """Accept no more, and give those that are answered some seconds."""
        await self._server.stop(drain)

    async def Process(  # type: ignore[override]  # noqa: N802  (gRPC's name; the stubs are those of threads)
        self, request_iterator: AsyncIterator[wire.ProcessingRequest], context: Any
    ) -> None:
        """Answer for one request of Envoy's."""
        first = await anext(request_iterator, None)
        if first is None:
            return
        if not first.HasField("request_headers") or first.observability_mode:
            words = "request_header_mode must be SEND, and observability_mode false"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        conversation = Conversation(self, first, request_iterator, context.write)
        self._observer.began(conversation.record)
        self._streams += 1
        try:
            await conversation.run()
        finally:
            self._streams -= 1
            self._observer.ended(conversation.record)

    # -- what conversations ask

    def route_of(self, record: Record) -> Route | None:
        if self._streams > MOST_STREAMS:
            raise Refused(BUSY)
        route = self._rules.router.matching(record.head)
        self._rules.callers.require_key(record, route)
        return route

    def decide(self, head: Head, route: Route | None, model: str | None) -> Decision:
        return self._rules.router.route(head, route, model, self._engine.load, random.random())

    def answered(self, record: Record, decision: Decision, route: Route | None) -> wire.ProcessingResponse | None:
        head = record.head
        model = decision.model if isinstance(decision, ToModel) else None
        sleeps = model is not None and self._engine.held[model.name].phase != Phase.AWAKE
        if model is not None and sleeps and (probe := probe_for(head, model)) is not None:
            record.status = probe.status
            return answers.immediate(probe.status, {"content-type": "text/plain"}, probe.body.encode(), "probe")
        self._rules.callers.require_quota(record, route)
        if isinstance(decision, Refusal) and head.path == "/health" and head.method == "GET":
            record.status = 200
            return answers.immediate(200, {"content-type": "text/plain"}, b"ok\n", "health")
        if isinstance(decision, ListModels):
            phases = {one: held.phase for one, held in self._engine.held.items()}
            record.status = 200
            return answers.json_answer(listed(self._rules.settings, phases, decision.name))
        return None

    def try_pass(self, name: str) -> Admission | None:
        return self._engine.try_pass(name)

    async def wait(self, name: str, *, bytes: int, deadline: float) -> Admission:
        return await self._engine.wait(name, bytes=bytes, deadline=deadline)

    def last_wake(self, name: str) -> LastWake | None:
        return self._engine.last_wake(name)

    async def endpoint(self, upstream: str) -> str:
        place, until = self._places.get(upstream, ("", 0.0))
        if time.monotonic() < until:
            return place
        host, port = place_of(upstream)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Refused(Refusal(503, "upstream_unreachable", f"{host} has no address: {error}", 1.0)) from error
        address = ip_address(str(found[0][4][0]))
        place = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
        self._places[upstream] = (place, time.monotonic() + KEPT_SECONDS)
        return place

    def key_of(self, peer: Peer) -> str:
        return self._rules.peer_keys.get(peer.name, "")
