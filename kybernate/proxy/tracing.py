"""Traces of requests by OpenTelemetry: a request that came in a trace continues it, and its spans are exported.

What is sent and where to is configured by OpenTelemetry's own environment variables; without them nothing of this is
loaded, and `traceparent` and `tracestate` go through as they came. Identifiers are chosen when a request comes, because
the upstream has to get them; its spans are made when it has ended. They wait in a bounded queue for a thread of the
library's: a collector that is slow or away costs spans, and holds up no request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Final

from kybernate.node.failure import Failure
from kybernate.proxy.record import LastWake, Record, Trace, code_of
from kybernate_shim import __version__
from kybernate_shim.logs import Log

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

SERVICE: Final = "kybernate-proxy"
HEADERS: Final = ("traceparent", "tracestate")
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS: Final = {  # module and extra of each protocol
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "traces"),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "tracing"),
}
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
MOST_PATH: Final = 512


@dataclass(frozen=True)
class Export:
    """Where spans go, and of which requests: those that clients sample, where `parent`, and a `share` of the rest."""

    endpoint: str
    protocol: str
    parent: bool = True
    share: float = 1.0


def export_of(environ: Mapping[str, str]) -> Export | None:
    """Return what OpenTelemetry's variables say, None where nothing is exported."""
    endpoint = _first(environ, ENDPOINTS)
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not endpoint or disabled or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return None
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    root = sampler.removeprefix("parentbased_")
    share = {"always_on": 1.0, "always_off": 0.0}.get(root, _share(environ.get("OTEL_TRACES_SAMPLER_ARG", "")))
    return Export(endpoint, _first(environ, PROTOCOLS) or "http/protobuf", root != sampler, share)


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return next((found for name in names if (found := environ.get(name, "").strip())), "")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        return 1.0
    return share if 0 <= share <= 1 else 1.0


class ToLog(logging.Handler):
    """Takes what OpenTelemetry says into the proxy's own log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning("traces.not_exported", error=record.getMessage())


class Traces:
    """Gives each request its place in a trace, and exports its spans once it has ended.

    Used in one thread, by the proxy's event loop; `processor` has its own.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import IdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        class Given(IdGenerator):
            """Returns identifiers that were chosen before."""

            trace_id = span_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

            def generate_span_id(self) -> int:
                return self.span_id or random.getrandbits(64)

        self._given, self._propagator = Given(), TraceContextTextMapPropagator()
        facts = Resource.create({"service.name": SERVICE, "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # of those that are exported, which were sampled when they came
            resource=facts.merge(OTELResourceDetector().detect()),  # the variables' names count
            shutdown_on_exit=False,
            id_generator=self._given,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE, __version__)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler  # that of the variables

    @classmethod
    def to(cls, export: Export, log: Log) -> Traces:
        """Send to a collector, in batches and from a thread. Raises Failure."""
        if export.protocol not in EXPORTERS:
            raise Failure(
                f"no traces are sent to {export.endpoint}: the protocol {export.protocol} is unknown",
                advice=f"set OTEL_EXPORTER_OTLP_PROTOCOL to {' or '.join(EXPORTERS)}",
            )
        module, extra = EXPORTERS[export.protocol]
        try:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = import_module(module).OTLPSpanExporter()
        except ImportError as error:
            raise Failure(
                f"no traces are sent to {export.endpoint}: {error}",
                advice=f"pip install 'kybernate[{extra}]' into the proxy's environment, or unset its endpoint",
            ) from error
        words = logging.getLogger("opentelemetry")
        words.handlers, words.propagate = [ToLog(log)], False
        return cls(BatchSpanProcessor(exporter))

    def began(self, record: Record) -> None:
        """Give a request its place in the trace that `traceparent` names, or in a new one."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace.sampling import Decision

        carrier = {name: list(record.all_of(name)) for name in HEADERS}
        context = self._propagator.extract(carrier) if len(carrier["traceparent"]) == 1 else None
        parent = trace.get_current_span(context).get_span_context() if context is not None else None
        if parent is not None and not parent.is_valid:
            parent = None
        trace_id = parent.trace_id if parent is not None else random.getrandbits(128)
        found = self._sampler.should_sample(context if parent is not None else None, trace_id, SERVICE)
        sampled = found.decision is Decision.RECORD_AND_SAMPLE
        own, upstream = random.getrandbits(64), random.getrandbits(64)
        record.trace = Trace(trace_id, own, upstream, parent.span_id if parent is not None else 0, sampled)

    def ended(self, record: Record, end: float | None = None) -> None:
        """Export the spans of a request that has ended now or at `end`: its own, and below it held, wake, upstream."""
        from opentelemetry import trace
        from opentelemetry.context import Context

        if (place := record.trace) is None or not place.sampled:
            return
        now = time.monotonic()
        end, behind = end or now, time.time_ns() - round(now * 1e9)

        def at(moment: float) -> int:
            return behind + round(moment * 1e9)

        def spanned(
            name: str, began: float, ended: float, inside: int, own: int, kind: trace.SpanKind, error: str,
            attributes: Mapping[str, AttributeValue],
        ) -> None:  # fmt: skip
            self._given.trace_id, self._given.span_id = place.trace_id, own
            above = trace.SpanContext(place.trace_id, inside, inside == place.parent, trace.TraceFlags(1))
            context = trace.set_span_in_context(trace.NonRecordingSpan(above)) if inside else Context()
            span: Span = self._tracer.start_span(name, context, kind, attributes, start_time=at(began))
            if error:
                span.set_attribute("error.type", error)
                span.set_status(trace.StatusCode.ERROR)
            span.end(at(max(began, ended)))

        kinds = trace.SpanKind
        held: dict[str, AttributeValue] = {"kybernate.model": record.model}
        waits = record.held_until or end
        refused = "" if record.held_until or record.reason == "client_gone" else record.reason
        spanned(
            name_of(record.head.method), record.started, end, place.parent, place.own, kinds.SERVER, error_of(record),
            attributes_of(record),
        )  # fmt: skip
        if record.held_since:
            spanned("held", record.held_since, waits, place.own, 0, kinds.INTERNAL, refused, held)
        if (woke := overlap(record.woke, record.held_since, waits)) is not None:
            outcome = woke.outcome or "not ended"
            spanned(
                "wake", woke.began, woke.ended, place.own, 0, kinds.INTERNAL, "" if outcome != "failed" else outcome,
                held | {"kybernate.outcome": outcome, "kybernate.wake_ms": milliseconds(woke.ended - woke.began)},
            )  # fmt: skip
        if record.passed:
            if record.answered:
                held["http.response.status_code"] = record.status
            spanned("upstream", record.passed, end, place.own, place.upstream, kinds.CLIENT, error_of(record), held)

    async def close(self, seconds: float) -> None:
        """Send what waits, for at most so long; a collector that does not answer then gets no more."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, seconds)


def name_of(method: str) -> str:
    """Return the name of a request's span: of the few that there are, whatever clients send."""
    return method if method in METHODS else "HTTP"


def error_of(record: Record) -> str:
    """Return what a request has failed of by this side, "" where it has not; refusals of 4xx are the client's."""
    code = code_of(record)
    if code >= 500 or (record.reason and code < 400):
        return record.reason or str(code)
    return ""


def attributes_of(record: Record) -> dict[str, AttributeValue]:
    """Return what the span of a request says, with OpenTelemetry's names where it has some."""
    texts = {
        "http.request.method": record.head.method,
        "server.address": record.head.host,
        "url.path": record.head.path[:MOST_PATH],
        "client.address": record.client,
        "kybernate.request_id": record.id,
        "kybernate.model": record.model,
        "kybernate.owner": record.owner,
        "kybernate.outcome": record.reason or "answered",
    }
    found: dict[str, AttributeValue] = {name: printable(text) for name, text in texts.items() if text}
    if code := code_of(record):
        found["http.response.status_code"] = code
    if record.held_since:
        found["kybernate.waited_ms"] = milliseconds((record.held_until or time.monotonic()) - record.held_since)
    if record.cold:
        found["kybernate.wake_ms"] = record.wake_ms
    return found


def printable(text: str) -> str:
    """Return a text that UTF-8 can have: a client's bytes may be none."""
    return text.encode("utf-8", "replace").decode()


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


def overlap(woke: LastWake | None, since: float, until: float) -> LastWake | None:
    """Return the part of a wake in which a request waited for it, None for one that it did not wait for."""
    if woke is None or not since or woke.ended <= since or woke.began >= until:
        return None
    return LastWake(max(woke.began, since), min(woke.ended, until), woke.outcome if woke.ended < inf else "")
