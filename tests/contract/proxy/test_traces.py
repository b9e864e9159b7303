"""Traces: continued over both planes, exported to a collector that speaks OTLP, and in no request's way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web

from kybernate.proxy.holding import Phase
from tests.contract.proxy.conftest import Standing
from tests.contract.proxy.stand import Stand, free_port, standing
from tests.contract.proxy.test_haproxy import passed_by_python

collected = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="extra `traces`")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="extra `traces`")

CAME = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-(0[01])")
RPC = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass
class Collector:
    """A server of OTLP. It keeps what it was sent; `may_answer` is set while it answers."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, data: bytes) -> bytes:
        self.requests += 1
        await self.may_answer.wait()
        for one in collected.ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append(values(one.resource))
            self.spans += [span for scope in one.scope_spans for span in scope.spans]
        return bytes(collected.ExportTraceServiceResponse().SerializeToString())

    def named(self, name: str) -> Any:
        (found,) = [one for one in self.spans if one.name == name]
        return found


def values(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@asynccontextmanager
async def collecting(protocol: str = "http/protobuf") -> AsyncIterator[Collector]:
    collector = Collector()
    collector.may_answer.set()
    if protocol == "grpc":

        async def export(request: bytes, context: Any) -> bytes:
            return await collector.take(request)

        server = grpc.aio.server()
        service, method = RPC.strip("/").split("/")
        handler = grpc.unary_unary_rpc_method_handler(export)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield collector
        finally:
            await server.stop(0)
        return

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/v1/traces"
        return web.Response(body=await collector.take(await request.read()), content_type="application/x-protobuf")

    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.may_answer.set()
        await runner.cleanup()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the variables of OpenTelemetry for a collector, and more of them."""

    def export(collector: Collector, **more: str) -> None:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "20"} | more
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return export


def sent(stand: Stand) -> re.Match[str]:
    """Return what the model was sent as the last traceparent."""
    found = TRACEPARENT.fullmatch(stand.upstream.seen[-1]["headers"]["traceparent"])
    assert found is not None
    return found


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_request_that_wakes_has_spans_of_its_parts(
    standing_proxy: Standing, exported: Any, protocol: str
) -> None:
    async with collecting(protocol) as collector:
        exported(collector, OTEL_EXPORTER_OTLP_PROTOCOL=protocol, OTEL_SERVICE_NAME="ours")
        async with standing_proxy() as stand:
            answer = await stand.chat(headers={"traceparent": CAME, "tracestate": "a=1", "X-Request-Id": "one"})
            assert answer.status == 200
            await stand.until(lambda: len(collector.spans) == 4)
            server, held, wake, upstream = (collector.named(name) for name in ("POST", "held", "wake", "upstream"))
            trace, onward = sent(stand)[1], sent(stand)[2]
            assert {one.trace_id.hex() for one in collector.spans} == {trace} == {CAME.split("-")[1]}
            assert server.parent_span_id.hex() == CAME.split("-")[2]
            assert {one.parent_span_id for one in (held, wake, upstream)} == {server.span_id}
            assert (upstream.span_id.hex(), sent(stand)[3]) == (onward, "01")
            assert stand.upstream.seen[-1]["headers"]["tracestate"] == "a=1"
            assert {values(one)["kybernate.model"] for one in collector.spans} == {"qwen"}
            wake_ms = int(answer.headers["X-Kybernate-Wake-Ms"])
            said = values(server)
            assert (said["kybernate.wake_ms"], said["kybernate.request_id"]) == (wake_ms, "one")
            assert (said["kybernate.outcome"], said["http.response.status_code"]) == ("answered", 200)
            assert values(wake)["kybernate.outcome"] == "woken"
            for one in (held, wake, upstream):
                assert server.start_time_unix_nano <= one.start_time_unix_nano <= one.end_time_unix_nano
                assert one.end_time_unix_nano <= server.end_time_unix_nano
            assert held.end_time_unix_nano <= upstream.start_time_unix_nano
            assert collector.resources[0]["service.name"] == "ours"


async def test_request_of_an_awake_model_has_spans_without_python_in_its_path(
    standing_proxy: Standing, exported: Any
) -> None:
    async with collecting() as collector:
        exported(collector)
        async with standing_proxy(phase=Phase.AWAKE) as stand:
            assert (await stand.chat(headers={"traceparent": CAME, "tracestate": "a=1"})).status == 200
            await stand.until(lambda: len(collector.spans) == 2)
            server, upstream = collector.named("POST"), collector.named("upstream")
            assert server.trace_id.hex() == CAME.split("-")[1] == sent(stand)[1]
            assert server.parent_span_id.hex() == CAME.split("-")[2]
            assert upstream.parent_span_id == server.span_id
            assert upstream.span_id.hex() == sent(stand)[2]
            assert stand.upstream.seen[-1]["headers"]["tracestate"] == "a=1"
            said = values(server)
            assert (said["kybernate.model"], said["http.response.status_code"]) == ("qwen", 200)
            assert (said["url.path"], said["client.address"]) == ("/v1/chat/completions", "127.0.0.1")
            assert said["kybernate.request_id"] == stand.upstream.seen[-1]["headers"]["x-request-id"]
            assert server.start_time_unix_nano <= upstream.start_time_unix_nano <= upstream.end_time_unix_nano
            assert passed_by_python(stand) == (0 if stand.plane == "haproxy" else 1)


BROKEN = {
    "none": {},
    "two": [("traceparent", CAME), ("traceparent", CAME.replace("b7", "c7"))],
    "zeros": {"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"},
    "no span": {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"},
    "capitals": {"traceparent": CAME.upper()},
    "short": {"traceparent": CAME[:-4]},
    "version ff": {"traceparent": "ff" + CAME[2:]},
    "more behind it": {"traceparent": CAME + "-x"},
    "words": {"traceparent": "let me in"},
}


@pytest.mark.parametrize("phase", [Phase.ASLEEP, Phase.AWAKE])
async def test_trace_that_cannot_be_read_is_not_continued(
    standing_proxy: Standing, exported: Any, phase: Phase
) -> None:
    async with collecting() as collector:
        exported(collector)
        async with standing_proxy(phase=phase) as stand:
            for broken in BROKEN.values():
                headers = [*(broken.items() if isinstance(broken, dict) else broken), ("tracestate", "a=1")]
                assert (await stand.chat(headers=headers)).status == 200
                assert sent(stand)[1] not in (CAME.split("-")[1], "0" * 32)
                assert "tracestate" not in stand.upstream.seen[-1]["headers"]
                if phase == Phase.ASLEEP:
                    stand.models.change("qwen", Phase.ASLEEP)
                    await stand.until(lambda: stand.held().phase == Phase.ASLEEP and stand.held().closed)
            roots = partial(list, (one for one in collector.spans if one.name == "POST"))
            await stand.until(lambda: sum(one.name == "POST" for one in collector.spans) == len(BROKEN))
            assert {one.parent_span_id for one in roots()} == {b""}
            assert len({one.trace_id for one in collector.spans}) == len(BROKEN)


@pytest.mark.parametrize("phase", [Phase.ASLEEP, Phase.AWAKE])
async def test_what_a_client_does_not_sample_is_continued_and_not_exported(
    standing_proxy: Standing, exported: Any, phase: Phase
) -> None:
    async with collecting() as collector:
        exported(collector, OTEL_TRACES_SAMPLER="parentbased_always_off")
        async with standing_proxy(phase=phase) as stand:
            await stand.chat(headers={"traceparent": CAME.removesuffix("1") + "0"})
            assert sent(stand)[0].endswith("-00")
            assert sent(stand)[1] == CAME.split("-")[1]
            assert (await stand.chat()).status == 200
            assert sent(stand)[3] == "00"
            await stand.chat(headers={"traceparent": CAME, "X-Request-Id": "sampled"})
            await stand.until(lambda: len(collector.spans) >= 2)
            assert {one.trace_id.hex() for one in collector.spans} == {CAME.split("-")[1]}
            (server,) = [one for one in collector.spans if one.name == "POST"]
            assert values(server)["kybernate.request_id"] == "sampled"


async def test_own_sampler_asks_no_client(standing_proxy: Standing, exported: Any) -> None:
    async with collecting() as collector:
        exported(collector, OTEL_TRACES_SAMPLER="always_off")
        async with standing_proxy(phase=Phase.AWAKE) as stand:
            await stand.chat(headers={"traceparent": CAME})
            assert (sent(stand)[1], sent(stand)[3]) == (CAME.split("-")[1], "00")
            assert not collector.requests


async def test_without_a_collector_headers_go_through_as_they_came(standing_proxy: Standing) -> None:
    for phase in (Phase.ASLEEP, Phase.AWAKE):
        async with standing_proxy(phase=phase) as stand:
            for headers in ({"traceparent": CAME, "tracestate": "a=1, b=2"}, {"traceparent": "words"}, {}):
                assert (await stand.chat(headers=headers)).status == 200
                got = stand.upstream.seen[-1]["headers"]
                assert {name: got[name] for name in got if name.startswith("trace")} == headers


async def test_refusals_say_why_in_their_spans(standing_proxy: Standing, exported: Any) -> None:
    async with collecting() as collector:
        exported(collector)
        async with standing_proxy(model="retry_after: 1h") as stand:
            stand.models.failure = "no room"
            assert (await stand.chat()).status == 503
            await stand.until(lambda: len(collector.spans) == 3)
            server, held, wake = (collector.named(name) for name in ("POST", "held", "wake"))
            assert (server.status.code, held.status.code, wake.status.code) == (2, 2, 2)
            assert values(server)["kybernate.outcome"] == values(held)["error.type"] == "wake_failed"
            assert values(wake)["kybernate.outcome"] == "failed"
            collector.spans.clear()
            assert (await stand.chat(model="none")).status == 404
            await stand.until(lambda: len(collector.spans) == 1)
            assert (collector.spans[0].status.code, values(collector.spans[0])["kybernate.outcome"]) == (
                0, "model_not_found",
            )  # fmt: skip
            stand.models.failure = ""


async def test_model_that_breaks_off_is_an_error_of_its_span(standing_proxy: Standing, exported: Any) -> None:
    async with collecting() as collector:
        exported(collector)
        async with standing_proxy("routes: [{to: qwen}]", phase=Phase.AWAKE) as stand:
            with pytest.raises(aiohttp.ClientError):
                await (await stand.client.get(f"{stand.url}/break")).read()
            await stand.until(lambda: len(collector.spans) == 2)
            assert {one.status.code for one in collector.spans} == {2}
            assert {values(one)["error.type"] for one in collector.spans} == {"upstream_broke"}


async def test_collector_that_is_slow_holds_up_no_request_and_costs_spans(
    standing_proxy: Standing, exported: Any
) -> None:
    """What waits for it is bounded, and the proxy does not wait for it at its end."""
    async with collecting() as collector:
        exported(collector, OTEL_BSP_MAX_QUEUE_SIZE="8", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4")
        collector.may_answer.clear()
        async with standing_proxy(phase=Phase.AWAKE) as stand:
            assert (await stand.chat()).status == 200
            await stand.until(lambda: collector.requests == 1, "it was asked, and does not answer")
            for _ in range(50):
                assert (await stand.chat()).status == 200
            collector.may_answer.set()
            await stand.until(lambda: len(collector.spans) >= 8)
        assert len(collector.spans) <= 4 + 8 + 4


async def test_proxy_ends_although_its_collector_does_not_answer(standing_proxy: Standing, exported: Any) -> None:
    async with collecting() as collector:
        exported(collector)
        collector.may_answer.clear()
        async with standing_proxy(phase=Phase.AWAKE) as stand:
            assert (await stand.chat()).status == 200
            await stand.until(lambda: collector.requests == 1)
            await stand.service.close(drain=0.1)
            assert not collector.spans


async def test_collector_that_is_away_is_said_in_the_log(standing_proxy: Standing, exported: Any) -> None:
    exported(Collector(endpoint=f"http://127.0.0.1:{free_port()}"), OTEL_EXPORTER_OTLP_TIMEOUT="0.1")
    async with standing_proxy(phase=Phase.AWAKE) as stand:
        for _ in range(5):
            assert (await stand.chat()).status == 200
        await stand.until(lambda: "traces.not_exported" in stand.log.getvalue())
        assert (await stand.chat()).status == 200


async def test_proxy_without_the_packages_serves_and_says_so(standing_proxy: Standing, exported: Any) -> None:
    exported(Collector(endpoint="http://127.0.0.1:1"), OTEL_EXPORTER_OTLP_PROTOCOL="http/json")
    async with standing_proxy() as stand:
        assert (await stand.chat(headers={"traceparent": CAME})).status == 200
        assert stand.upstream.seen[-1]["headers"]["traceparent"] == CAME
        assert "tracing.refused" in stand.log.getvalue()


async def test_spans_of_haproxy_that_nothing_reads_hold_up_no_request(tmp_path: Path, exported: Any) -> None:
    async with collecting() as collector:
        exported(collector)
        async with standing(plane="haproxy", place=tmp_path, phase=Phase.AWAKE) as stand:
            lines = stand.service.trace_lines
            assert lines is not None
            asyncio.get_running_loop().remove_reader(lines._socket)
            for _ in range(700):  # more than the kernel keeps for a socket of this kind
                assert (await stand.chat()).status == 200
            assert passed_by_python(stand) == 0
            asyncio.get_running_loop().add_reader(lines._socket, lines._read)
            await stand.until(lambda: len(collector.spans) >= 2)
