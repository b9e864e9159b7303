"""What Prometheus and OpenTelemetry get of operations that end."""

from __future__ import annotations

import asyncio
import builtins
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kybernate.agent.telemetry import scraping
from kybernate.agent.telemetry.ended import Ended
from kybernate.agent.telemetry.metrics import Metrics
from kybernate.agent.telemetry.tracing import Tracing
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure


class Hub:
    """Knows some objects."""

    def __init__(self, **objects: list[Any]) -> None:
        self._objects = objects

    def objects(self, kind: str) -> list[Any]:
        return self._objects.get(kind, [])


def operation(state: wire.OperationState, id: str = "a") -> wire.Operation:
    one = wire.Operation(id=id, verb="checkpoint", state=state, requester="uid 0 (pid 1)")
    one.created.FromSeconds(1000)
    one.started.FromSeconds(1002)
    one.ended.FromSeconds(1007)
    one.steps.add(name="dump", seconds=3, bytes=100)
    one.steps.add(name="digest", seconds=0.5, bytes=50, spared_bytes=7)
    if state == wire.FAILED:
        one.error.type, one.error.message = "Failed", "CRIU has failed"
    return one


def test_operation_is_counted_once_when_it_ends_in_this_run() -> None:
    heard: list[str] = []
    ended = Ended([lambda one: heard.append(one.id)])
    ended(operation(wire.SUCCEEDED, "of an earlier run"))
    for state in (wire.PENDING, wire.RUNNING, wire.CANCELLING, wire.CANCELLED, wire.CANCELLED):
        ended(operation(state))
    assert heard == ["a"]


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_operations_steps_and_bytes_are_counted() -> None:
    metrics = Metrics()
    metrics.ended(operation(wire.SUCCEEDED))
    metrics.ended(operation(wire.SUCCEEDED))
    metrics.ended(operation(wire.FAILED))
    assert sample(metrics, "kybernate_operations_total", verb="checkpoint", state="succeeded") == 2
    assert sample(metrics, "kybernate_operations_total", verb="checkpoint", state="failed") == 1
    assert sample(metrics, "kybernate_operation_step_seconds_sum", verb="checkpoint", step="dump") == 9
    assert sample(metrics, "kybernate_operation_step_seconds_bucket", verb="checkpoint", step="dump", le="1.0") == 0
    assert sample(metrics, "kybernate_operation_bytes_total", verb="checkpoint", step="digest") == 150


def test_prometheus_gets_counters_and_what_is_known_now() -> None:
    hub = Hub(
        gpu=[wire.Gpu(uuid="GPU-1", model="H200", total_bytes=10, used_bytes=4, free_bytes=6)],
        tier=[wire.Tier(name="disk", capacity_bytes=100, used_bytes=5, images=3)],
        operation=[operation(wire.RUNNING), operation(wire.SUCCEEDED, "b")],
        container=[wire.Container(gpu="SUSPENDED"), wire.Container(), wire.Container(sandbox=True)],
    )

    async def main() -> str:
        metrics = Metrics()
        metrics.ended(operation(wire.SUCCEEDED))
        server, port = await metrics.serve("127.0.0.1:0", hub)  # type: ignore[arg-type]
        try:
            with pytest.raises(Failure, match="ddress already in use"):
                await Metrics().serve(f"127.0.0.1:{port}", hub)  # type: ignore[arg-type]
            return await asyncio.to_thread(scraped, port)
        finally:
            await server.close()

    def scraped(port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    lines = asyncio.run(main()).splitlines()
    assert 'kybernate_gpu_used_bytes{model="H200",uuid="GPU-1"} 4.0' in lines
    assert 'kybernate_tier_images{name="disk"} 3.0' in lines
    assert 'kybernate_operations_active{verb="checkpoint"} 1.0' in lines
    assert 'kybernate_containers{gpu="suspended"} 1.0' in lines
    assert 'kybernate_containers{gpu="none"} 1.0' in lines
    assert 'kybernate_operations_total{state="succeeded",verb="checkpoint"} 1.0' in lines
    assert any(line.startswith("kybernate_build_info{version=") for line in lines)


async def silent(port: int, count: int) -> list[asyncio.StreamWriter]:
    return [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(count)]


async def asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


def test_idle_connections_keep_neither_threads_nor_prometheus_places() -> None:
    async def main() -> None:
        before = threading.active_count()
        server, port = await Metrics().serve("127.0.0.1:0", Hub())  # type: ignore[arg-type]
        writers = await silent(port, 4 * scraping.MOST_CONNECTIONS)
        assert b"kybernate_build_info" in await asked(port, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert threading.active_count() <= before + 1
        assert len(server._pending._since) <= scraping.MOST_CONNECTIONS  # what it keeps is the claim
        await server.close()
        for writer in writers:
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 405"),
        (b"GET /secrets HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (64 << 10), b""),
        (b"\x16\x03\x01 of TLS\r\n\r\n", b""),
    ],
)
def test_other_requests_to_the_metrics_port_are_refused(request_: bytes, answer: bytes) -> None:
    async def main() -> bytes:
        server, port = await Metrics().serve("127.0.0.1:0", Hub())  # type: ignore[arg-type]
        try:
            return await asked(port, request_)
        except ConnectionResetError:
            return b""
        finally:
            await server.close()

    assert asyncio.run(main())[: len(b"HTTP/1.1 405")] == answer


def traced(one: wire.Operation) -> list[Any]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), "gpu-1")
    tracing.ended(one)
    tracing.close()
    return list(exporter.get_finished_spans())


def test_operation_is_a_trace_with_its_steps() -> None:
    dump, digest, whole = traced(operation(wire.SUCCEEDED))
    assert (whole.name, dump.name, digest.name) == ("checkpoint", "dump", "digest")
    assert {span.context.trace_id for span in (dump, digest)} == {whole.context.trace_id}
    assert dump.parent.span_id == digest.parent.span_id == whole.context.span_id
    times = [(span.start_time / 1e9, span.end_time / 1e9) for span in (whole, dump, digest)]
    assert times == [(1002, 1007), (1002, 1005), (1005, 1005.5)]
    assert whole.attributes["kybernate.operation"] == "a"
    assert whole.attributes["kybernate.waited_seconds"] == 2
    assert digest.attributes["kybernate.spared_bytes"] == 7
    assert whole.status.is_unset
    assert whole.resource.attributes["host.name"] == "gpu-1"


def test_failure_is_in_the_trace() -> None:
    whole = traced(operation(wire.FAILED))[-1]
    assert (whole.status.is_ok, whole.status.description) == (False, "CRIU has failed")
    assert whole.attributes["kybernate.error"] == "Failed"


def test_agent_without_the_packages_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Failure, match="no traces are sent to http://localhost:4317"):
        Tracing.to("http://localhost:4317", "gpu-1")


def test_collector_that_does_not_answer_holds_nothing_up() -> None:
    """In a process of its own: the thread that tries to send stays, and other tests fork the one that they are in."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = (
            "import os; from tests.unit.agent import test_telemetry as test; "
            f"tracing = test.Tracing.to('http://127.0.0.1:{silent.getsockname()[1]}', 'gpu-1'); "
            "tracing.ended(test.operation(test.wire.SUCCEEDED)); os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
