"""What Envoy is answered: pure functions from decisions to messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kybernate.messages import ext_proc_pb2 as wire
from kybernate.proxy.api_errors import Refusal, body_of
from kybernate.proxy.routing import Head

DESTINATION: Final = "x-gateway-destination-endpoint"
MODEL: Final = "x-kybernate-model"
OWN: Final = (DESTINATION, MODEL)
PIECE: Final = 60 << 10  # of a body that is sent back; Envoy recommends at most 64 KiB
LONGEST: Final = 3600.0  # seconds that Envoy lets an answer take at most
GRPC_STATUS: Final = {400: 3, 401: 16, 403: 7, 404: 5, 413: 8, 429: 8, 501: 12, 504: 4}
OVERWRITE: Final = wire.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def texts(headers: wire.HttpHeaders) -> dict[str, str]:
    """Return the headers of a message, of those with one name the first; pseudo headers begin with a colon."""
    found: dict[str, str] = {}
    for one in headers.headers.headers:
        found.setdefault(one.key.lower(), (one.raw_value or one.value.encode()).decode("utf-8", "surrogateescape"))
    return found


def head_of(headers: Mapping[str, str]) -> Head:
    """Return what routes look at, of the headers of a request."""
    path, _, query = headers.get(":path", "/").partition("?")
    host = headers.get(":authority", "") or headers.get("host", "")
    host = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    named = {name: value for name, value in headers.items() if not name.startswith(":")}
    return Head(headers.get(":method", "GET"), host.lower(), path, named, model_in(query))


def model_in(query: str) -> str:
    """Return the model that a query names, "" for none."""
    if "model=" not in query:
        return ""
    from urllib.parse import parse_qs  # for the few requests that name it there

    return next(iter(parse_qs(query, max_num_fields=64).get("model", [])), "")


def mutation(given: Mapping[str, str], removed: Iterable[str] = ()) -> wire.HeaderMutation:
    """Return a change of headers: those given replace what there is."""
    changes = [
        wire.HeaderValueOption(
            header=wire.HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
            append_action=OVERWRITE,
        )
        for name, value in given.items()
    ]
    return wire.HeaderMutation(set_headers=changes, remove_headers=removed)


def passed(given: Mapping[str, str], removed: Iterable[str]) -> wire.CommonResponse:
    """Return that a request is passed, with these headers, to the route that they meet."""
    return wire.CommonResponse(header_mutation=mutation(given, removed), clear_route_cache=True)


def with_metadata(response: wire.ProcessingResponse, endpoint: str) -> wire.ProcessingResponse:
    """Name the endpoint in the metadata as well, where a load balancer of Envoy's may look for it."""
    if endpoint:
        response.dynamic_metadata.update({"envoy.lb": {DESTINATION: endpoint}})
    return response


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str) -> wire.ProcessingResponse:
    """Return an answer that Envoy gives by itself."""
    return wire.ProcessingResponse(
        immediate_response=wire.ImmediateResponse(
            status=wire.HttpStatus(code=status), headers=mutation(headers), body=body, details=f"kybernate_{details}"
        )
    )


def refused(refusal: Refusal, api: str, request_id: str, *, grpc: bool) -> wire.ProcessingResponse:
    """Return an error in the form of the API that was called; for a call of gRPC, its status."""
    body, kind = body_of(refusal, api, request_id)
    response = immediate(refusal.status, {"content-type": kind, **_lower(refusal.headers)}, body, refusal.reason)
    if grpc:
        response.immediate_response.body = refusal.message.encode()
        response.immediate_response.grpc_status.status = GRPC_STATUS.get(refusal.status, 14)
    return response


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def json_answer(value: Mapping[str, Any]) -> wire.ProcessingResponse:
    return immediate(200, {"content-type": "application/json"}, json.dumps(value).encode(), "answered")


def longer(seconds: float) -> wire.ProcessingResponse:
    """Return that the answer to this message takes longer than usual. Envoy takes this once for a message."""
    response = wire.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(round(min(seconds, LONGEST) * 1000))
    return response


def pieces(body: bytes, *, last: bool) -> Iterator[wire.ProcessingResponse]:
    """Yield a body that is sent back in the mode FULL_DUPLEX_STREAMED; `last` says that no more follows."""
    starts = range(0, len(body), PIECE) or range(1)
    for start in starts:
        end = last and start == starts[-1]
        streamed = wire.StreamedBodyResponse(body=body[start : start + PIECE], end_of_stream=end)
        common = wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=streamed))
        yield wire.ProcessingResponse(request_body=wire.BodyResponse(response=common))
