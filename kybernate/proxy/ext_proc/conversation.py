"""One request that Envoy asks about: its head, what is needed of its body, the wait, and its answer until the end.

A stream ends when Envoy has passed on the whole answer, or the client is gone: so it is the request's activity.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from math import inf
from typing import Final, Protocol

from kybernate.messages import ext_proc_pb2 as wire
from kybernate.proxy.api_errors import Refusal, api_of
from kybernate.proxy.embedded import headers as rules
from kybernate.proxy.engine import Admission, Refused
from kybernate.proxy.ext_proc import answers
from kybernate.proxy.filters import filtered
from kybernate.proxy.keys import KEY_HEADERS
from kybernate.proxy.model_field import fields_of, model_in
from kybernate.proxy.record import LastWake, Record
from kybernate.proxy.routing import Decision, Head, ListModels, NeedBody, ToModel, ToPeer
from kybernate.proxy.settings import Limits, Model, Peer, Route

WANTED: Final = frozenset({"model"})
WHOLE: Final = frozenset({wire.BUFFERED, wire.BUFFERED_PARTIAL})
NOT_SENT: Final = (
    "the model is named in the body, which Envoy does not send before the request is passed: request_body_mode must be"
    " FULL_DUPLEX_STREAMED or BUFFERED"
)

Requests = AsyncIterator[wire.ProcessingRequest]
Write = Callable[[wire.ProcessingResponse], Awaitable[None]]


class Brain(Protocol):
    """What decides, whichever door a request came by. `load`, `route` and the like are those of router and engine."""

    limits: Limits

    def route_of(self, record: Record) -> Route | None:
        """Return the route that a request meets. Raises Refused where its caller may not use it."""
        ...

    def decide(self, head: Head, route: Route | None, model: str | None) -> Decision: ...

    def answered(self, record: Record, decision: Decision, route: Route | None) -> wire.ProcessingResponse | None:
        """Return the answer to what needs no model: a probe of one that sleeps, the list of models, a health check."""
        ...

    def try_pass(self, name: str) -> Admission | None: ...

    async def wait(self, name: str, *, bytes: int, deadline: float) -> Admission: ...

    def last_wake(self, name: str) -> LastWake | None: ...

    async def endpoint(self, upstream: str) -> str:
        """Return ADDRESS:PORT. Raises Refused."""
        ...

    def key_of(self, peer: Peer) -> str: ...


class Body:
    """The body of a request, as far as Envoy sends it. `prefix` has what was read before it was decided about."""

    def __init__(self, first: wire.ProcessingRequest, requests: Requests, write: Write, limits: Limits) -> None:
        protocol = first.protocol_config
        self.mode = protocol.request_body_mode if first.HasField("protocol_config") else wire.BUFFERED
        self.duplex = self.mode == wire.FULL_DUPLEX_STREAMED
        self.whole = self.mode in WHOLE
        self.exists = not first.request_headers.end_of_stream
        early = self.mode == wire.STREAMED and protocol.send_body_without_waiting_for_header_response
        self.seen = self.duplex or self.whole or early
        self._requests, self._write, self._limits = requests, write, limits
        self.prefix = bytearray()
        self.messages = 0  # of the body, that were not answered yet
        self.ended = not self.exists
        self.after: wire.ProcessingRequest | None = None  # the message that ended it, such as trailers
        self._received = 0

    async def next(self) -> bytes:
        """Return the next bytes, b"" at the end. Raises Refused for a client that is too slow."""
        while not self.ended:
            try:
                async with asyncio.timeout(self._limits.body_seconds):
                    message = await anext(self._requests)
            except TimeoutError:
                words = f"no byte of the body arrived for {self._limits.body_seconds:.0f} s"
                raise Refused(Refusal(408, "client_slow", words)) from None
            if not message.HasField("request_body"):
                self.after, self.ended = message, True
                break
            self.messages += 1
            self.ended = message.request_body.end_of_stream
            self.count(len(message.request_body.body))
            if message.request_body.body:
                return message.request_body.body
        return b""

    def count(self, size: int) -> None:
        """Take the size of a piece. Raises Refused where all of them are too large."""
        self._received += size
        if self._received > self._limits.body:
            raise Refused(too_large(self._limits.body))

    async def model(self, content_type: str) -> str:
        """Return the model that the first bytes name, "" for none."""
        scanner = fields_of(content_type, WANTED)
        if scanner is None or not self.exists:
            return ""
        while not scanner.done and len(self.prefix) < self._limits.prefix and (piece := await self.next()):
            scanner.feed(piece[: self._limits.prefix - len(self.prefix)])
            self.prefix += piece
        return model_in(scanner.found)

    async def read_whole(self) -> bytes:
        """Return all of it, for filters. Raises Refused where it is larger than they may be."""
        while len(self.prefix) <= self._limits.filtered:
            if not (piece := await self.next()):
                return bytes(self.prefix)
            self.prefix += piece
        raise Refused(too_large(self._limits.filtered))


def too_large(most: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body is larger than {most} bytes, which is the limit here")


class Conversation:
    """Answers the messages of one stream. `record` has what became of the request."""

    def __init__(self, brain: Brain, first: wire.ProcessingRequest, requests: Requests, write: Write) -> None:
        self._brain, self._requests, self._write = brain, requests, write
        self._headers = answers.texts(first.request_headers)
        self._head = answers.head_of(self._headers)
        self._body = Body(first, requests, write, brain.limits)
        self._late = False  # the head was answered, and the body's answer has what was decided
        self._prolonged = False
        headers = self._head.headers
        self.record = Record(
            id=headers["x-request-id"] if "x-request-id" in headers else secrets.token_hex(12),
            client=headers.get("x-forwarded-for", "").rpartition(",")[2].strip(),
            head=self._head,
            api=api_of(self._head.path, "anthropic-version" in headers),
        )

    async def run(self) -> None:
        """Answer until Envoy ends the stream. What the client is refused, it is told by Envoy."""
        try:
            with ExitStack() as until_end:
                if await self._request(until_end):
                    await self._rest()
        except Refused as refused:
            self.record.status, self.record.reason = refused.refusal.status, refused.refusal.reason
            grpc = rules.is_grpc(self._head.headers)
            await self._write(answers.refused(refused.refusal, self.record.api, self.record.id, grpc=grpc))
        finally:
            if not self.record.status:
                self.record.reason = self.record.reason or "client_gone"

    async def _request(self, until_end: ExitStack) -> bool:
        """Decide, wait, and pass the request; return False where it was answered here."""
        brain, record = self._brain, self.record
        length = self._head.headers.get("content-length", "")
        if length.isdecimal() and int(length) > brain.limits.body:
            raise Refused(too_large(brain.limits.body))
        route = brain.route_of(record)
        decision = brain.decide(self._head, route, None)
        if (answer := brain.answered(record, decision, route)) is not None:
            await self._write(answer)
            return False
        if isinstance(decision, NeedBody):
            decision = brain.decide(self._head, route, await self._model())
        drop = KEY_HEADERS if route is not None and route.keys else frozenset[str]()
        match decision:
            case ToModel(model):
                await self._to_model(model, drop, until_end)
            case ToPeer(peer):
                record.model = f"peer {peer.name}"
                key = brain.key_of(peer)
                given = {answers.MODEL: peer.name} | ({"authorization": f"Bearer {key}"} if key else {})
                removed = {answers.DESTINATION, *((KEY_HEADERS - {"authorization"}) if key else drop)}
                await self._pass(given, removed, "", None)
            case Refusal():
                raise Refused(decision)
            case ListModels() | NeedBody():
                raise AssertionError(decision)
        return True

    async def _model(self) -> str:
        if self._body.exists and not self._body.seen:
            raise Refused(Refusal(501, "body_not_sent", NOT_SENT))
        await self._see_body()
        return await self._body.model(self._head.headers.get("content-type", ""))

    async def _see_body(self) -> None:
        """Have Envoy send the body, where it waits for that until the head is answered."""
        await self._prolong(self._brain.limits.body_seconds)
        if self._body.whole and self._body.exists and not self._late:
            self._late, self._prolonged = True, False
            await self._write(wire.ProcessingResponse(request_headers=wire.HeadersResponse()))

    async def _prolong(self, seconds: float) -> None:
        """Say once that the answer to this message takes longer than usual."""
        if not self._prolonged:
            self._prolonged = True
            await self._write(answers.longer(seconds))

    async def _to_model(self, model: Model, drop: frozenset[str], until_end: ExitStack) -> None:
        record, body = self.record, self._body
        record.model = model.name
        content = await self._filtered(model)
        deadline = rules.seconds_of_client(self._head.headers) or inf
        admission = self._brain.try_pass(model.name)
        if admission is None:
            await self._prolong(answers.LONGEST)
            with record.holding(lambda: self._brain.last_wake(model.name)):
                admission = await self._brain.wait(model.name, bytes=len(body.prefix), deadline=deadline)
        until_end.enter_context(admission)
        record.waited, record.cold = admission.waited, admission.cold
        record.wake_ms = round(admission.waited * 1000)
        endpoint = await self._brain.endpoint(model.upstream)
        await self._pass({answers.DESTINATION: endpoint, answers.MODEL: model.name}, drop, endpoint, content)

    async def _filtered(self, model: Model) -> bytes | None:
        body, kind = self._body, self._head.headers.get("content-type", "")
        if not (model.filters or model.upstream_model) or not body.exists or "json" not in kind.lower():
            return None
        if not (body.duplex or body.whole):
            words = f"the body of requests for {model.name} is changed, which Envoy does not let: {NOT_SENT}"
            raise Refused(Refusal(501, "body_not_sent", words))
        await self._see_body()
        try:
            return filtered(await body.read_whole(), model.filters, model.upstream_model)
        except ValueError as error:
            raise Refused(Refusal(400, "bad_json", f"the body is no JSON object: {error}")) from error

    async def _pass(
        self, given: dict[str, str], removed: set[str] | frozenset[str], endpoint: str, content: bytes | None
    ) -> None:
        """Pass the request, with the body that was read until now."""
        body = self._body
        given["x-request-id"] = self.record.id
        common = answers.passed(given, removed)
        if self._late:
            if content is not None:
                common.body_mutation.body = content
                common.header_mutation.MergeFrom(answers.mutation({"content-length": str(len(content))}))
            response = wire.ProcessingResponse(request_body=wire.BodyResponse(response=common))
            await self._write(answers.with_metadata(response, endpoint))
            body.messages = 0
            return
        response = wire.ProcessingResponse(request_headers=wire.HeadersResponse(response=common))
        await self._write(answers.with_metadata(response, endpoint))
        if body.duplex and (body.messages or content is not None):
            for piece in answers.pieces(
                content if content is not None else bytes(body.prefix), last=body.ended and body.after is None
            ):
                await self._write(piece)
        elif not body.duplex:
            for _ in range(body.messages):
                await self._write(wire.ProcessingResponse(request_body=wire.BodyResponse()))
        body.prefix.clear()

    async def _rest(self) -> None:
        """Answer all other messages: the rest of the body, and what is sent of the answer."""
        if self._body.after is not None:
            await self._answer(self._body.after)
        async for message in self._requests:
            await self._answer(message)

    async def _answer(self, message: wire.ProcessingRequest) -> None:
        match message.WhichOneof("request"):
            case "request_body":
                self._body.count(len(message.request_body.body))
                for response in self._back(message.request_body):
                    await self._write(response)
            case "request_trailers":
                await self._write(wire.ProcessingResponse(request_trailers=wire.TrailersResponse()))
            case "response_headers":
                await self._write(self._answer_began(message.response_headers))
            case "response_body":
                self.record.sent += len(message.response_body.body)
                await self._write(wire.ProcessingResponse(response_body=wire.BodyResponse()))
            case "response_trailers":
                await self._write(wire.ProcessingResponse(response_trailers=wire.TrailersResponse()))

    def _back(self, piece: wire.HttpBody) -> list[wire.ProcessingResponse]:
        if self._body.duplex:
            return list(answers.pieces(piece.body, last=piece.end_of_stream))
        return [wire.ProcessingResponse(request_body=wire.BodyResponse())]

    def _answer_began(self, headers: wire.HttpHeaders) -> wire.ProcessingResponse:
        record, status = self.record, answers.texts(headers).get(":status", "")
        record.status, record.answered = int(status) if status.isdecimal() else 502, time.monotonic()
        given = {"x-request-id": record.id} | ({"x-kybernate-wake-ms": str(record.wake_ms)} if record.cold else {})
        common = wire.CommonResponse(header_mutation=answers.mutation(given))
        return wire.ProcessingResponse(response_headers=wire.HeadersResponse(response=common))
