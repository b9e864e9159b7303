"""What of a trace is decided without any collector: variables, HAProxy's lines, times of a wake."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.haproxy.tracing import record_of
from kybernate.proxy.record import LastWake, Record
from kybernate.proxy.routing import Head
from kybernate.proxy.tracing import Export, error_of, export_of, name_of, overlap

HERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
HTTP = "http/protobuf"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (HERE, Export("http://c:4318", HTTP)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/v1/traces"} | HERE, Export("http://t/v1/traces", HTTP)),
        (HERE | {"OTEL_SDK_DISABLED": "True"}, None),
        (HERE | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (HERE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, Export("http://c:4318", "grpc")),
        (HERE | {"OTEL_TRACES_SAMPLER": "always_off"}, Export("http://c:4318", HTTP, False, 0.0)),
        (
            HERE | {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            Export("http://c:4318", HTTP, True, 0.25),
        ),
        (
            HERE | {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "many"},
            Export("http://c:4318", HTTP, False, 1.0),
        ),
    ],
)
def test_variables_of_opentelemetry_say_what_is_exported(variables: dict[str, str], found: Export | None) -> None:
    assert export_of(variables) == found


MODELS = {"model_qwen": "qwen"}
LINE = (
    "0af7651916cd43dd8448eb211c80319c 00f067aa0ba902b7 b7ad6b7169203331 {parent} 1000000 "
    "{queued} 1 {answered} 3 {status} {state} 120 model_qwen id-1 10.0.0.1 POST h:8080 /v1/a b"
)


def line(**more: object) -> str:
    return LINE.format(**{"parent": "-", "queued": 0, "answered": 4, "status": 200, "state": "--"} | more)


def test_line_of_haproxy_is_a_request() -> None:
    found = record_of(line(), MODELS, now=50.0, clock=2.0)
    assert found is not None
    record, end = found
    assert (record.model, record.status, record.sent, record.id, record.client) == (
        "qwen",
        200,
        120,
        "id-1",
        "10.0.0.1",
    )
    assert (record.head.method, record.head.host, record.head.path) == ("POST", "h:8080", "/v1/a b")
    assert (record.started, record.passed, end) == pytest.approx((49.0, 49.0, 49.008))
    assert record.trace is not None
    assert record.trace.traceparent == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert (record.trace.parent, record.held_since, record.reason) == (0, 0.0, "")


def test_line_of_haproxy_says_who_has_ended_it_and_how_long_it_was_queued() -> None:
    cases = {
        "client_gone": line(state="CD"),
        "upstream_broke": line(state="SD", queued=20),
        "upstream_failed": line(state="SH", answered=-1, status=502),
    }
    for reason, text in cases.items():
        found = record_of(text, MODELS, now=50.0, clock=2.0)
        assert found is not None
        assert found[0].reason == reason
    queued = record_of(cases["upstream_broke"], MODELS, now=50.0, clock=2.0)
    assert queued is not None
    assert (queued[0].held_since, queued[0].held_until) == pytest.approx((49.0, 49.02))
    found = record_of(line(parent="00000000000000aa"), MODELS, now=0.0, clock=0.0)
    assert found is not None
    assert found[0].trace is not None
    assert found[0].trace.parent == 0xAA


@given(some.text() | some.sampled_from([line(), line(status="x"), "- - - -"]).map(lambda text: text[:-1]))
def test_line_that_is_none_of_a_request_is_left_out(text: str) -> None:
    found = record_of(text, {}, now=0.0, clock=0.0)
    assert found is None
    assert record_of(line(status="x"), MODELS, now=0.0, clock=0.0) is None


def test_wake_counts_as_long_as_the_request_has_waited_for_it() -> None:
    assert overlap(LastWake(1.0, 4.0, "woken"), 2.0, 5.0) == LastWake(2.0, 4.0, "woken")
    assert overlap(LastWake(1.0, inf, ""), 2.0, 5.0) == LastWake(2.0, 5.0, "")
    assert overlap(LastWake(1.0, 2.0, "woken"), 2.0, 5.0) is None
    assert overlap(LastWake(6.0, 7.0, "woken"), 2.0, 5.0) is None
    assert overlap(None, 2.0, 5.0) is None


def test_refusals_that_are_the_clients_are_no_errors() -> None:
    def record(status: int, reason: str) -> Record:
        refusal = Refusal(status, reason, "")
        return Record(
            id="1", client="c", head=Head("GET", "h", "/", {}), api="", status=refusal.status, reason=refusal.reason
        )

    assert error_of(record(404, "model_not_found")) == ""
    assert error_of(record(200, "client_gone")) == ""
    assert error_of(record(503, "wake_failed")) == "wake_failed"
    assert error_of(record(500, "")) == "500"
    assert error_of(record(200, "upstream_broke")) == "upstream_broke"
    assert (name_of("GET"), name_of("g" * 900)) == ("GET", "HTTP")
