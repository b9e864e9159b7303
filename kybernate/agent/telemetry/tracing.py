"""One OpenTelemetry trace for each operation that has ended; its steps are the spans.

The packages are those of the extra `tracing`. They are loaded only where an endpoint is configured; the agent works
without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.node.words import word
from kybernate_shim import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

SERVICE: Final = "kybernate-agent"


class Tracing:
    """Sends traces through `processor`."""

    def __init__(self, processor: SpanProcessor, node: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        facts = {"service.name": SERVICE, "service.version": __version__, "host.name": node}
        self._provider = TracerProvider(resource=Resource(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE, __version__)

    @classmethod
    def to(cls, endpoint: str, node: str) -> Tracing:
        """Send to a collector, in batches and from a thread. Raises Failure."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise Failure(
                f"no traces are sent to {endpoint}: {error}",
                advice="pip install 'kybernate[tracing]' into the agent's environment, or remove `tracing.endpoint`",
            ) from error
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)), node)

    def ended(self, operation: wire.Operation) -> None:
        """Send the trace of an operation.

        A step says how long it took, and not when it began: the spans are put one after the other, from the begin of
        the operation on. Steps that ran in parallel may so end later than the operation.
        """
        from opentelemetry import trace

        begin = (operation.started if operation.HasField("started") else operation.created).ToNanoseconds()
        span = self._tracer.start_span(operation.verb, start_time=begin, attributes=_attributes(operation))
        if operation.state == wire.FAILED:
            span.set_status(trace.StatusCode.ERROR, operation.error.message)
        inside = trace.set_span_in_context(span)
        for step in operation.steps:
            end = begin + round(step.seconds * 1e9)
            numbers = {"kybernate.bytes": step.bytes, "kybernate.spared_bytes": step.spared_bytes}
            self._tracer.start_span(step.name, inside, start_time=begin, attributes=numbers).end(end)
            begin = end
        span.end(operation.ended.ToNanoseconds())

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def _attributes(operation: wire.Operation) -> dict[str, Any]:
    state = word(wire.OperationState, operation.state)
    texts = {
        "operation": operation.id,
        "state": state,
        "container": operation.container,
        "namespace": operation.namespace,
        "image": operation.image,
        "requester": operation.requester,
        "error": operation.error.type,
    }
    found: dict[str, Any] = {f"kybernate.{name}": text for name, text in texts.items() if text}
    found["kybernate.waited_seconds"] = (operation.started.ToNanoseconds() - operation.created.ToNanoseconds()) / 1e9
    return found
