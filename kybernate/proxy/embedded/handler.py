"""Answers requests: checks, routes, holds, passes on. The order of these steps is this module's subject."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from math import inf
from typing import Any, Final
from urllib.parse import quote

from aiohttp import ClientSession, web
from multidict import CIMultiDict

from kybernate.proxy import progress
from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.embedded import headers as header_rules
from kybernate.proxy.embedded.body import Body
from kybernate.proxy.embedded.connection import has_hung_up
from kybernate.proxy.embedded.exchange import Exchange, api_of_request, head_of
from kybernate.proxy.embedded.upgrade import pass_upgrade, wants_upgrade
from kybernate.proxy.embedded.upstream import Inner, Upstreams
from kybernate.proxy.engine import Admission, Engine, Refused
from kybernate.proxy.filters import filtered
from kybernate.proxy.holding import Phase
from kybernate.proxy.keys import KEY_HEADERS
from kybernate.proxy.model_field import model_in
from kybernate.proxy.models_list import listed
from kybernate.proxy.record import Observer
from kybernate.proxy.routing import Decision, Head, ListModels, NeedBody, ToModel, ToPeer, probe_for
from kybernate.proxy.rules import Rules
from kybernate.proxy.settings import Model, Peer
from kybernate_shim.logs import Log

MODEL: Final = frozenset({"model"})
MODEL_AND_STREAM: Final = frozenset({"model", "stream"})
HUNG_UP_SECONDS: Final = 0.5
NO_KEYS: Final[frozenset[str]] = frozenset()


class Handler:
    """Answers each request."""

    def __init__(
        self,
        rules: Rules,
        engine: Engine,
        client: ClientSession,
        observer: Observer,
        log: Log,
        inner: Inner | None = None,
    ) -> None:
        settings = rules.settings
        self._limits = settings.limits
        self._rules, self._engine, self._observer, self._log = rules, engine, observer, log
        self._behind = inner is not None
        self._upstreams = Upstreams(client, settings.limits.send_seconds, inner)
        self.trusted = [ip_network(one) for one in settings.trusted]
        self._progressing = any(model.progress != "none" for model in settings.models)
        self._draw: Callable[[], float] = random.random

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        protocol: Any = request.protocol
        protocol.head_arrived()
        exchange = self._exchange(request)
        self._observer.began(exchange)
        try:
            try:
                answer = await self._answered(exchange)
            except Refused as refused:
                answer = await exchange.refuse(refused.refusal)
            exchange.status = exchange.status or answer.status
            if exchange.is_last:
                answer.force_close()
            return answer
        except ConnectionError:
            exchange.reason = exchange.reason or "client_gone"
            return exchange.abort()
        except asyncio.CancelledError:
            exchange.reason = "client_gone"
            raise
        finally:
            self._observer.ended(exchange)

    def _exchange(self, request: web.BaseRequest) -> Exchange:
        head, target = head_of(request)
        peer = request.transport.get_extra_info("peername") if request.transport else None
        address = peer[0] if isinstance(peer, tuple) else "unix"
        trusted = header_rules.is_trusted(address, self.trusted) or address == "unix"
        client = address
        if trusted and (before := head.headers.get("x-forwarded-for")):
            client = before.rpartition(",")[2].strip()
        return Exchange(
            id=header_rules.request_id_of(head.headers), client=client, head=head, api=api_of_request(head),
            request=request, trusted=trusted, target=target,
        )  # fmt: skip

    async def _answered(self, exchange: Exchange) -> web.StreamResponse:
        request, head = exchange.request, exchange.head
        headers = CIMultiDict(request.headers)
        mistake = header_rules.mistake_in(head.method, request.version, request._message.path, headers)
        if mistake is not None and not (self._behind and header_rules.is_grpc(head.headers)):
            raise Refused(mistake)
        rules = self._rules
        router, callers = rules.router, rules.callers
        route = router.matching(head)
        callers.require_key(exchange, route)
        decision = router.route(head, route, None, self._engine.load, self._draw())
        if isinstance(decision, ToModel) and (probe := self._probe(head, decision.model)) is not None:
            return probe
        if mistake is not None:
            return await self._wake_for_grpc(exchange, decision, mistake)
        callers.require_quota(exchange, route)
        if isinstance(decision, Refusal) and head.path == "/health" and head.method == "GET":
            return web.Response(text="ok\n")
        body = Body(request, self._limits)
        fields: Mapping[str, Any] = {}
        if isinstance(decision, NeedBody) or (self._progressing and body.exists):
            fields = await body.fields(MODEL_AND_STREAM if self._progressing else MODEL)
        if isinstance(decision, NeedBody):
            decision = router.route(head, route, model_in(fields), self._engine.load, self._draw())
        drop = KEY_HEADERS if route is not None and route.keys else NO_KEYS
        return await self._decided(exchange, decision, body, headers, drop, bool(fields.get("stream")))

    async def _decided(
        self,
        exchange: Exchange,
        decision: Decision,
        body: Body,
        headers: CIMultiDict[str],
        drop: frozenset[str],
        streams: bool,
    ) -> web.StreamResponse:
        match decision:
            case ToModel(model):
                exchange.model = model.name
                passed = self._headers(exchange, headers, drop)
                return await self._to_model(exchange, model, body, passed, headers, streams)
            case ToPeer(peer):
                exchange.model = f"peer {peer.name}"
                return await self._to_peer(exchange, peer, body, self._headers(exchange, headers, drop))
            case ListModels(name):
                return self._list(name)
            case Refusal():
                raise Refused(decision)
        raise AssertionError(decision)

    # -- where to

    def _probe(self, head: Head, model: Model) -> web.StreamResponse | None:
        """Return the answer of a probe whose model is not awake; it neither wakes the model nor is it activity."""
        probe = probe_for(head, model) if self._engine.held[model.name].phase != Phase.AWAKE else None
        return None if probe is None else web.Response(status=probe.status, text=probe.body)

    def _list(self, name: str) -> web.StreamResponse:
        phases = {one: held.phase for one, held in self._engine.held.items()}
        return web.Response(
            text=json.dumps(listed(self._rules.settings, phases, name)), content_type="application/json"
        )

    def _headers(self, exchange: Exchange, headers: CIMultiDict[str], drop: frozenset[str]) -> CIMultiDict[str]:
        scheme = "https" if exchange.request.secure else "http"
        return header_rules.for_upstream(
            headers, client=self._peer_of(exchange), scheme=scheme, request_id=exchange.id, trusted=exchange.trusted,
            drop=drop, trace=exchange.trace,
        )  # fmt: skip

    @staticmethod
    def _peer_of(exchange: Exchange) -> str:
        peer = exchange.request.transport.get_extra_info("peername") if exchange.request.transport else None
        return str(peer[0]) if isinstance(peer, tuple) else ""

    async def _to_peer(
        self, exchange: Exchange, peer: Peer, body: Body, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        headers.popall("Host", None)
        if key := self._rules.peer_keys.get(peer.name):
            for name in KEY_HEADERS:
                headers.popall(name, None)
            headers["Authorization"] = f"Bearer {key}"
        left = min(header_rules.seconds_of_client(exchange.head.headers) or 30.0, 30.0)
        return await self._upstreams.pass_on(exchange, body, None, peer.url, headers, left, lambda: None)

    async def _to_model(
        self,
        exchange: Exchange,
        model: Model,
        body: Body,
        headers: CIMultiDict[str],
        original: CIMultiDict[str],
        streams: bool,
    ) -> web.StreamResponse:
        if exchange.head.path in {one.path for one in model.probes}:  # of a model that is awake: no activity
            return await self._upstreams.pass_on(
                exchange, body, None, self._engine.upstream_of(model), headers, 5.0, lambda: None
            )
        exchange.through = model.name
        content = await self._filtered(model, body)
        deadline = header_rules.seconds_of_client(exchange.head.headers) or inf
        with await self._admitted(exchange, model, len(body.prefix), deadline, streams) as admission:
            left = min(deadline, model.queue.age) - admission.waited
            if wants_upgrade(original) and not body.exists:
                return await pass_upgrade(exchange, self._engine.upstream_of(model), headers)
            return await self._upstreams.pass_on(
                exchange, body, content, self._engine.upstream_of(model), headers, left, lambda: None
            )

    async def _filtered(self, model: Model, body: Body) -> bytes | None:
        if not body.exists or not (model.filters or model.upstream_model):
            return None
        if "json" not in body.kind:
            return None
        try:
            return filtered(await body.read_whole(), model.filters, model.upstream_model)
        except ValueError as error:
            raise Refused(Refusal(400, "bad_json", f"the body is no JSON object: {error}")) from error

    # -- waiting

    async def _wake_for_grpc(self, exchange: Exchange, decision: Decision, mistake: Refusal) -> web.StreamResponse:
        """Wake a model for a call of gRPC, which only the other plane can pass: its client repeats it there.

        UNAVAILABLE is what gRPC's clients repeat by themselves, where they are told to wait or to retry.
        """
        if not isinstance(decision, ToModel):
            raise Refused(mistake)
        exchange.model = decision.model.name
        deadline = header_rules.seconds_of_client(exchange.head.headers) or inf
        words = "the model is awake now; call again"
        try:
            with await self._admitted(exchange, decision.model, 0, deadline, False):
                pass
        except Refused as refused:
            words = refused.refusal.message
        headers = {"Content-Type": "application/grpc", "Grpc-Status": "14", "Grpc-Message": quote(words, safe=" ,;:")}
        return web.Response(status=200, headers=headers)

    async def _admitted(self, exchange: Exchange, model: Model, size: int, deadline: float, streams: bool) -> Admission:
        if passed := self._engine.try_pass(model.name):
            return passed
        with exchange.holding(lambda: self._engine.last_wake(model.name)):
            if streams and model.progress != "none":
                admission = await self._admitted_with_progress(exchange, model, size, deadline)
            elif exchange.request.content.at_eof():
                admission = await self._engine.wait(model.name, bytes=size, deadline=deadline)
            else:
                admission = await self._admitted_unread(exchange, model, size, deadline)
        exchange.waited, exchange.cold = admission.waited, admission.cold
        exchange.wake_ms = round(admission.waited * 1000)
        return admission

    async def _admitted_unread(self, exchange: Exchange, model: Model, size: int, deadline: float) -> Admission:
        """Wait with a body that is not read further, and so without seeing the end of the connection: look for it."""
        waiting = asyncio.ensure_future(self._engine.wait(model.name, bytes=size, deadline=deadline))
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=HUNG_UP_SECONDS)
                if not waiting.done() and has_hung_up(exchange.request.transport):
                    raise ConnectionResetError("the client has hung up")
            return waiting.result()
        except BaseException:
            waiting.cancel()
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().__exit__(None, None, None)
            raise

    async def _admitted_with_progress(self, exchange: Exchange, model: Model, size: int, deadline: float) -> Admission:
        """Wait, and say so in the stream from time to time."""
        engine, name, began = self._engine, model.name, asyncio.get_running_loop().time()
        cold = engine.held[name].phase != Phase.AWAKE
        id, future = engine.enqueue(name, bytes=size, deadline=deadline)
        try:
            while not future.done():
                await asyncio.wait((future,), timeout=model.progress_every)
                if not future.done():
                    answer = exchange.answer or await exchange.begin_stream()
                    await answer.write(self._words(exchange, model, engine.place_in_queue(name, id), began))
            future.result()
        except BaseException:
            engine.leave(name, id)
            raise
        return engine.admitted(name, id, began, cold)

    def _words(self, exchange: Exchange, model: Model, place: int, began: float) -> bytes:
        seconds = asyncio.get_running_loop().time() - began
        left = max(0.0, self._engine.usual_wake(model.name) - seconds)
        if model.progress == "comments" or not exchange.head.path.endswith("/chat/completions"):
            return progress.comment(place, seconds, left)
        return progress.chunk(model.name, exchange.id, int(time.time()), place, seconds, left)
