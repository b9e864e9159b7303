"""One request and its answer. Where the answer has begun, an error is an event of its stream, or its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from kybernate.proxy.api_errors import Refusal, api_of, body_of, event_of
from kybernate.proxy.progress import SSE
from kybernate.proxy.record import Record
from kybernate.proxy.routing import Head

REQUEST_ID: Final = "X-Request-Id"
WAKE_MS: Final = "X-Kybernate-Wake-Ms"


class Taken(web.StreamResponse):
    """The answer of a connection whose bytes were written by other means."""

    def __init__(self) -> None:
        super().__init__()
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


@dataclass(kw_only=True)
class Exchange(Record):
    """A request of the embedded plane. `target` is path and query, as they came."""

    request: web.BaseRequest
    trusted: bool
    target: str
    through: str = ""  # the model, where another data plane passes this request on and counts it
    answer: web.StreamResponse | None = None

    def all_of(self, name: str) -> Sequence[str]:
        return self.request.headers.getall(name, ())

    @property
    def is_last(self) -> bool:
        """Whether its connection ends with it: the parser may take a trailer for a header of the next request."""
        return bool(self.request._message.chunked)

    async def begin(self, status: int, headers: CIMultiDict[str], reason: str | None = None) -> web.StreamResponse:
        """Send the head of the answer."""
        answer = web.StreamResponse(status=status, reason=reason, headers=headers)
        answer.headers[REQUEST_ID] = self.id
        if self.cold:
            answer.headers[WAKE_MS] = str(self.wake_ms)
        if self.is_last:
            answer.force_close()
        self.status, self.answered, self.answer = status, time.monotonic(), answer
        await answer.prepare(self.request)
        return answer

    async def begin_stream(self) -> web.StreamResponse:
        """Send the head of a stream of events before the model is awake."""
        return await self.begin(200, CIMultiDict({"Content-Type": SSE, "Cache-Control": "no-store"}))

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """Answer with an error; in a stream that has begun, it is its last event."""
        self.reason = refusal.reason
        if self.answer is not None:
            await self.answer.write(event_of(refusal, self.api, self.id))
            await self.answer.write_eof()
            return self.answer
        body, kind = body_of(refusal, self.api, self.id)
        headers = {"Content-Type": kind, REQUEST_ID: self.id, **refusal.headers}
        self.status = refusal.status
        answer = web.Response(status=refusal.status, body=body, headers=headers)
        if refusal.status in (400, 408, 413) or self._may_have_no_body:
            answer.force_close()  # what follows on this connection may be the rest of what was refused
        return answer

    @property
    def _may_have_no_body(self) -> bool:
        """Whether a client that waits for 100 Continue may take the refusal for a word to send no body."""
        return "expect" in self.head.headers and not self.request.content.at_eof()

    def abort(self) -> web.StreamResponse:
        """End an answer that cannot be completed, so that its client sees that it is cut off."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return Taken()


def head_of(request: web.BaseRequest) -> tuple[Head, str]:
    """Return what routes look at, and path with query as they came. Absolute targets, as clients send them to
    proxies, are those of their path.
    """
    message = request._message
    target = message.path
    if not target.startswith("/"):
        url = URL(target, encoded=True) if target != "*" else URL("/*", encoded=True)
        target = url.raw_path_qs
    path, _, query = target.partition("?")
    host = request.headers.get("host", "").rpartition("]")[2] if "]" not in request.headers.get("host", "") else ""
    host = host.partition(":")[0] if host else request.headers.get("host", "").partition("]")[0].lstrip("[")
    headers = {name.lower(): value for name, value in request.headers.items()}
    repeated = frozenset[str]()
    if len(headers) < len(request.headers):
        times = Counter(name.lower() for name, _ in request.headers.items())
        repeated = frozenset(name for name, count in times.items() if count > 1)
    named = URL(f"/?{query}", encoded=True).query.get("model", "") if "model=" in query else ""
    return Head(message.method, host.lower(), path, headers, named, repeated), target


def api_of_request(head: Head) -> str:
    return api_of(head.path, "anthropic-version" in head.headers)
