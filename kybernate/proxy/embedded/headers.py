"""Which headers go through, and which are the proxy's own: pure functions of what client and upstream sent."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final

from multidict import CIMultiDict

from kybernate.proxy.api_errors import Refusal
from kybernate.proxy.record import Trace

Headers = Mapping[str, str]
# RFC 9110, 7.6.1, and those that clients send to proxies alone.
HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
OURS: Final = frozenset(
    {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-request-id", "x-kybernate-backend", "expect"}
)
# Servers of the CGI kind, as those of WSGI are, take Content_Length and Content-Length for one header.
FRAMING: Final = frozenset({"content-length", "content-type"})
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")
HOST: Final = re.compile(r"[A-Za-z0-9._~%!$&()*+;=-]*(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
TIMEOUTS: Final = ("x-request-timeout", "x-stainless-read-timeout", "x-stainless-timeout")
WAIT: Final = re.compile(r"(?:^|[,;\s])wait=(\d+(?:\.\d+)?)")
Networks = Sequence[IPv4Network | IPv6Network]


def passed_on(headers: CIMultiDict[str], *, but: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on: neither those of one connection nor those in `but`."""
    named = {one.strip().lower() for value in headers.getall("connection", ()) for one in value.split(",")}
    left_out = HOP_BY_HOP | but | named
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in left_out and not ("_" in name and stands_for(name, left_out | FRAMING))
    )


def stands_for(name: str, names: Iterable[str]) -> bool:
    """Return whether a server that takes underscores for hyphens takes a header for one of `names`."""
    return name.lower().replace("_", "-") in names


def for_upstream(
    headers: CIMultiDict[str],
    *,
    client: str,
    scheme: str,
    request_id: str,
    trusted: bool,
    drop: frozenset[str],
    trace: Trace | None = None,
) -> CIMultiDict[str]:
    """Return the headers of the request that is passed on. What a trusted proxy before this one said is kept.

    With `trace`, the model continues that one, and what systems before have said of another one is left out.

    `client` is the peer's address, "" for a UNIX socket, whose peer has said all there is.
    """
    found = passed_on(headers, but=OURS | drop)
    before = headers.getall("x-forwarded-for", ()) if trusted else ()
    found["X-Forwarded-For"] = ", ".join([*before, *([client] if client else [])])
    found["X-Forwarded-Proto"] = (headers.get("x-forwarded-proto") if trusted else None) or scheme
    host = (headers.get("x-forwarded-host") if trusted else None) or headers.get("host", "")
    if host:
        found["X-Forwarded-Host"] = host
    found["X-Request-Id"] = request_id
    if trace is not None:
        found["traceparent"] = trace.traceparent
        if not trace.parent:
            found.popall("tracestate", None)
    return found


def request_id_of(headers: Headers) -> str:
    """Return the id that the client gave, where it can stand in a log, or a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def is_trusted(client: str, networks: Networks) -> bool:
    """Return whether the peer is a proxy whose forwarded headers count."""
    if not networks:
        return False
    try:
        address = ip_address(client)
    except ValueError:
        return True  # a UNIX socket: only root's own programs reach it
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:10.0.0.1, as a socket for both families has it
    return any((mapped or address) in network for network in networks)


def seconds_of_client(headers: Headers) -> float | None:
    """Return how long the client says that it waits, None where it does not say."""
    for name in TIMEOUTS:
        value = headers.get(name, "")
        if value.replace(".", "", 1).isdecimal() and (number := float(value)) > 0:
            return number
    found = WAIT.search(headers.get("prefer", ""))
    return float(found[1]) if found and float(found[1]) > 0 else None


def is_grpc(headers: Headers) -> bool:
    return headers.get("content-type", "").lower().startswith("application/grpc")


def mistake_in(method: str, version: tuple[int, int], target: str, headers: CIMultiDict[str]) -> Refusal | None:
    """Return why a request that the parser took is refused all the same, or None.

    What two servers may read differently is not passed on: several hosts, a length with chunks, codings that are
    not chunks. What needs HTTP/2 is refused by its name.
    """
    hosts = headers.getall("host", ())
    if len(hosts) > 1 or (version >= (1, 1) and not hosts) or not all(HOST.fullmatch(one) for one in hosts):
        return Refusal(400, "bad_host", "the request needs exactly one Host header with a host's name")
    codings = ",".join(headers.getall("transfer-encoding", ())).strip().lower()
    lengths = headers.getall("content-length", ())
    if codings and (lengths or codings != "chunked" or version < (1, 1)):
        return Refusal(400, "bad_framing", "the length of the body is ambiguous")
    if len(lengths) > 1 or not all(one.isascii() and one.isdecimal() for one in lengths):
        return Refusal(400, "bad_framing", "the length of the body is ambiguous")
    if method == "CONNECT" or not _is_target(method, target):
        return Refusal(405, "bad_method", f"{method} of this target is not answered here")
    if not target.startswith("/") and target != "*" and not _is_of_host(target, next(iter(hosts), "")):
        return Refusal(400, "bad_host", "the request's target and its Host name two hosts")
    if is_grpc(headers):
        return Refusal(501, "needs_haproxy", "gRPC needs HTTP/2, which only the plane haproxy has (plane: haproxy)")
    if "trailer" in headers:
        return Refusal(501, "needs_haproxy", "trailers need the plane haproxy (plane: haproxy)")
    if headers.get("expect", "100-continue").lower() != "100-continue":
        return Refusal(417, "bad_expect", "only Expect: 100-continue is known")
    return None


def _is_target(method: str, target: str) -> bool:
    """Return whether a target is one of a request, without a fragment, which is a client's own."""
    if "#" in target:
        return False
    return target.startswith(("/", "http://", "https://")) or (target == "*" and method == "OPTIONS")


def _is_of_host(target: str, host: str) -> bool:
    """Return whether an absolute target, as clients send it to proxies, is of the host that the header names."""
    scheme, _, rest = target.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    usual = ":443" if scheme == "https" else ":80"
    return authority.lower().removesuffix(usual) == host.lower().removesuffix(usual)
