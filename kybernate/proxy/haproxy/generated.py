"""HAProxy's configuration, from the proxy's settings. Pure: text from settings and paths.

A request goes to its model's backend where the map has that backend for its model, and nothing needs the activator: a
selector, a filter, a quota, a probe, a body in chunks whose size must be counted. Everything else is the activator's,
which is the embedded plane on a UNIX socket.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kybernate.proxy.embedded.headers import FRAMING, HOP_BY_HOP, OURS
from kybernate.proxy.haproxy.tracing import log_lines, trace_lines
from kybernate.proxy.keys import KEY_HEADERS
from kybernate.proxy.routing import ODD_AS_WRITTEN, ODD_DECODED
from kybernate.proxy.settings import Model, Route, Settings
from kybernate.proxy.tracing import Export

ACTIVATOR: Final = "activator"
BUFFER: Final = 32 << 10  # bytes of head and body that are seen before a request is routed
MAX_HEADERS: Final = 32767
CHUNKED_LINE: Final = 1024
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9._:/@+-]+")  # which map, runtime API and JSON have in one form
# What a body has where HAProxy may take another model of it than JSON says: it compares keys as they are written, so a
# letter of `model` may be escaped (6 is the first digit of each), and its texts end with a zero. What both begin with
# is looked for first: most bodies do not have it, and are searched once.
ESCAPED: Final = "\\u00"
ODD_NAMES: Final = ("\\u006", "\\u0000")
ERRORS: Final = {
    400: ("bad_request", "the request is malformed"),
    408: ("client_slow", "the request did not arrive in time"),
    413: ("body_too_large", "the body is larger than it may be"),
    500: ("internal", "the proxy failed"),
    502: ("upstream_failed", "the model ended the connection without an answer"),
    503: ("upstream_unreachable", "the port of the model, or the proxy, does not accept now"),
    504: ("deadline", "the model did not answer in time"),
}


@dataclass(frozen=True)
class Places:
    """Files and sockets of the child, below one directory."""

    state: Path

    @property
    def config(self) -> Path:
        return self.state / "haproxy.cfg"

    @property
    def admin(self) -> Path:
        return self.state / "admin.sock"

    @property
    def activator(self) -> Path:
        return self.state / "activator.sock"

    @property
    def inner(self) -> Path:
        return self.state / "inner.sock"

    @property
    def map(self) -> Path:
        return self.state / "models.map"

    @property
    def traces(self) -> Path:
        return self.state / "traces.sock"

    @property
    def pid(self) -> Path:
        return self.state / "haproxy.pid"

    def keys(self, number: int) -> Path:
        return self.state / f"keys-{number}"


def backend_of(name: str) -> str:
    """Return the name of a model's backend: letters that HAProxy takes, and no two models the same."""
    plain = re.sub(r"[^A-Za-z0-9.:-]", lambda found: f"_{ord(found[0]):x}_", name)
    return f"model_{plain}"


def direct_models(settings: Settings) -> list[Model]:
    """Return the models whose requests need nothing that the activator alone can do."""
    return [one for one in settings.models if not one.filters and not one.upstream_model and _is_http(one)]


def map_entries(settings: Settings, model: Model) -> list[str]:
    """Return the keys of the map that stand for a model: its names, as requests and routes have them.

    Others are the activator's: a number in a body is no name, and HAProxy makes a text of it.
    """
    return [name for name in (model.name, *model.aliases) if PLAIN_NAME.fullmatch(name) and not _is_number(name)]


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def written_map(settings: Settings) -> str:
    """Return the map as it is when HAProxy starts: every model is the activator's."""
    names = [name for model in direct_models(settings) for name in map_entries(settings, model)]
    return "".join(f"{name} {ACTIVATOR}\n" for name in names)


def generated(settings: Settings, places: Places, max_connections: int, export: Export | None = None) -> str:
    """Return the whole configuration. The lines that the settings add stand at the end of their sections.

    With `export`, requests that HAProxy passes by itself are in traces as well.
    """
    sections = [
        _global(settings, places, max_connections),
        _defaults(settings),
        _frontend(settings, places, export),
        _inner(places),
        [f"backend {ACTIVATOR}", "    http-reuse safe", f"    server activator unix@{places.activator}"],
        *(_backend(settings, model) for model in direct_models(settings)),
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _global(settings: Settings, places: Places, max_connections: int) -> list[str]:
    threads = [f"    nbthread {settings.haproxy.threads}"] if settings.haproxy.threads else []
    return [
        "global",
        f"    stats socket {places.admin} mode 600 level admin expose-fd listeners",
        f"    maxconn {max_connections}",
        *threads,
        f"    tune.bufsize {BUFFER}",
        f"    tune.http.maxhdr {min(settings.limits.headers, MAX_HEADERS)}",
        *_added(settings.haproxy.extra_global),
    ]


def _defaults(settings: Settings) -> list[str]:
    limits = settings.limits
    return [
        "defaults",
        "    mode http",
        "    option http-no-delay",
        "    option abortonclose",
        "    option splice-auto",
        "    timeout connect 5s",
        f"    timeout client {_ms(min(limits.body_seconds, limits.send_seconds))}",
        "    timeout server 1h",
        "    timeout tunnel 24h",
        f"    timeout http-request {_ms(limits.head_seconds)}",
        f"    timeout http-keep-alive {_ms(limits.idle_seconds)}",
        *(_error(status) for status in ERRORS),
        *_added(settings.haproxy.extra_defaults),
    ]


def _error(status: int) -> str:
    reason, message = ERRORS[status]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": reason}})
    after = " hdr Retry-After 5" if status == 503 else ""
    return f"    http-error status {status} content-type application/json string '{body}'{after}"


def _frontend(settings: Settings, places: Places, export: Export | None) -> list[str]:
    host, port = settings.listen
    return [
        "frontend public",
        f"    bind {f'[{host}]' if ':' in host else host}:{port}",
        *_clients(settings),
        *(log_lines(places.traces) if export is not None else ()),
        *_checks(settings),
        *_headers(settings),
        *_routes(settings, places, export),
        *_added(settings.haproxy.extra_frontend),
        f"    default_backend {ACTIVATOR}",
    ]


def _inner(places: Places) -> list[str]:
    """The entrance of the activator: requests that it has held share a backend's limit with all others."""
    return [
        "frontend inner",
        f"    bind unix@{places.inner} mode 600",
        "    http-request set-var(txn.backend) req.hdr(x-kybernate-backend)",
        "    http-request del-header X-Kybernate-Backend",
        "    use_backend %[var(txn.backend)]",
    ]


def _clients(settings: Settings) -> Iterator[str]:
    """Limit the connections of one client. Its table has a lock, which each request takes: 0 leaves it out."""
    yield f"    acl trusted src {' '.join(settings.trusted) or '127.255.255.255'}"
    if settings.limits.per_client:
        yield "    stick-table type ipv6 size 100k expire 10m store conn_cur"
        yield "    tcp-request connection track-sc0 src unless trusted"
        yield f"    tcp-request connection reject if {{ sc0_conn_cur gt {settings.limits.per_client} }}"


def _checks(settings: Settings) -> Iterator[str]:
    """Refuse what two servers may read differently, as the embedded plane does, with the end of the connection.

    What HAProxy takes, it writes again in one form: no length with chunks, no folded lines, no line feeds alone.
    """
    yield "    http-request reject unless { req.hdr_cnt(host) eq 1 }"
    yield "    http-request reject unless { req.ver 1.0 1.1 2.0 }"
    host = r"^([A-Za-z0-9._~%!$&()*+,;=-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
    yield f"    http-request reject unless {{ req.hdr(host) -m reg '{host}' }}"
    yield "    http-request reject if { req.hdr(transfer-encoding) -m found } { req.ver 1.0 }"
    yield "    http-request reject if { req.hdr_cnt(transfer-encoding) gt 1 }"
    yield "    http-request reject if { method CONNECT }"
    yield "    http-request reject if { url -m sub '#' }"
    if any(route.paths for route in settings.routes):  # what the embedded plane's router refuses as odd
        yield f"    http-request reject if {{ path -m reg '{ODD_AS_WRITTEN}' }}"
        yield f"    http-request reject if {{ path,url_dec -m reg '{ODD_DECODED}' }}"
    yield f"    http-request deny deny_status 413 if {{ req.hdr_val(content-length) gt {settings.limits.body} }}"


def _headers(settings: Settings) -> Iterator[str]:
    """Set and remove headers. Each condition is asked of each request: where no client is trusted, none is."""
    untrusted = " unless trusted" if settings.trusted else ""
    known = r"'^[A-Za-z0-9_.:/+=@-]{1,128}$'"
    yield f"    http-request set-header X-Request-Id %[uuid()] unless {{ req.hdr(x-request-id) -m reg {known} }}"
    yield "    http-request set-var(txn.id) req.hdr(x-request-id)"
    yield "    http-after-response set-header X-Request-Id %[var(txn.id)] if { var(txn.id) -m found }"
    for name in ("For", "Proto", "Host"):
        yield f"    http-request del-header X-Forwarded-{name}{untrusted}"
    yield "    http-request add-header X-Forwarded-For %[src]"
    for name, value in (("Proto", "%[ssl_fc,iif(https,http)]"), ("Host", "%[req.hdr(host)]")):
        found = f" unless {{ req.hdr(x-forwarded-{name.lower()}) -m found }}" if settings.trusted else ""
        yield f"    http-request set-header X-Forwarded-{name} {value}{found}"
    for name in ("X-Kybernate-Backend", "Keep-Alive", "Proxy-Connection", "Proxy-Authorization"):
        yield f"    http-request del-header {name}"
    shadows = "|".join(with_underscores(HOP_BY_HOP | OURS | FRAMING | KEY_HEADERS))
    yield f"    http-request del-header '^({shadows})$' -m reg if {{ req.hdr_names -m sub _ }}"
    yield "    http-request del-header TE unless { req.hdr(te) -m str trailers }"


def with_underscores(names: Iterable[str]) -> list[str]:
    """Return the names that a server takes for one of `names` where it takes underscores for hyphens."""
    found = (product(*(("-", "_") if letter == "-" else (letter,) for letter in name)) for name in sorted(names))
    return [name for variants in found for name in map("".join, variants) if "_" in name]


def _routes(settings: Settings, places: Places, export: Export | None) -> Iterator[str]:
    """Set txn.model where a request may go to its model without the activator, and look it up in the map."""
    yield "    acl one_type req.fhdr_cnt(content-type) eq 1"
    yield "    acl json_type req.fhdr(content-type),field(1,';'),lower -m str application/json"
    yield "    acl json_type req.fhdr(content-type),field(1,';'),lower -m end +json"
    yield f"    acl escaped req.body -m sub {_quoted(ESCAPED)}"
    yield f"    acl odd_names req.body -m sub {' '.join(map(_quoted, ODD_NAMES))}"
    for number, route in enumerate(settings.routes if not _is_only(settings) else ()):
        yield from _conditions(number, route)
        met = " ".join(_names(number, route))
        first = "!{ var(txn.route) -m found }"
        yield f"    http-request set-var(txn.route) int({number}) if {first}{f' {met}' if met else ''}"
    for number, route in enumerate(settings.routes):
        yield from _model_of(number, route, places, only=_is_only(settings))
    yield from _needs_activator(settings)
    yield f"    http-request set-var(txn.backend) var(txn.model),map({places.map})"
    goes = "{ var(txn.backend) -m found } !needs_activator plain_connection"
    for name in sorted(KEY_HEADERS if any(route.keys for route in settings.routes) else ()):
        yield f"    http-request del-header {name} if {{ var(txn.owned) -m found }} {goes}"
    if export is not None:
        yield from trace_lines(export, f"{goes} !{{ var(txn.backend) -m str {ACTIVATOR} }}")
    yield f"    use_backend %[var(txn.backend)] if {goes}"


def _is_only(settings: Settings) -> bool:
    """Return whether there is one route, for all requests, which need not be asked for theirs then."""
    return len(settings.routes) == 1 and not any(_names(0, settings.routes[0]))


def _conditions(number: int, route: Route) -> Iterator[str]:
    for host in route.hosts:
        yield f"    acl r{number}_host req.hdr(host),field(1,:),lower -m str {_quoted(host)}"
    for path in route.paths:
        yield f"    acl r{number}_path path,url_dec -m str {_quoted(path)}"
        yield f"    acl r{number}_path path,url_dec -m beg {_quoted(path if path.endswith('/') else path + '/')}"
    for index, (name, value) in enumerate(route.headers.items()):
        yield f"    acl r{number}_header{index} req.fhdr({name}) -m str {_quoted(value)}"
        yield f"    acl r{number}_once{index} req.fhdr_cnt({name}) eq 1"


def _names(number: int, route: Route) -> Iterator[str]:
    if route.hosts:
        yield f"r{number}_host"
    if route.paths:
        yield f"r{number}_path"
    for index in range(len(route.headers)):
        yield f"r{number}_header{index} r{number}_once{index}"


def _model_of(number: int, route: Route, places: Places, *, only: bool) -> Iterator[str]:
    """Find the model of a request on this route: the route's own, or the one that the body's first bytes name.

    `only`: it is the route of all requests.
    """
    if route.quota:
        return
    chosen = "TRUE" if only else f"{{ var(txn.route) -m int {number} }}"
    if route.keys:
        bearer = "{ req.fhdr_cnt(authorization) eq 1 } { req.fhdr(authorization) -m beg -i 'bearer ' }"
        key = "req.fhdr(authorization),word(2,' '),sha2(256),hex,lower"
        yield f"    http-request set-var(txn.key) {key} if {chosen} {bearer}"
        known = f"{{ var(txn.key) -m str -f {places.keys(number)} }}"
        yield f"    http-request set-var(txn.owned) int(1) if {chosen} {known}"
        chosen += " { var(txn.owned) -m found }"
    if route.to:
        yield f"    http-request set-var(txn.model) str({_quoted(route.to)}) if {chosen}"
        return
    json_body = "{ method POST } one_type json_type"
    yield f"    http-request wait-for-body time {_ms(60.0)} if {chosen} {json_body}"
    plain = f"{chosen} {json_body} !escaped or {chosen} {json_body} !odd_names"
    yield f"    http-request set-var(txn.model) req.body,json_query('$.model') if {plain}"


def _needs_activator(settings: Settings) -> Iterator[str]:
    """Name the requests that only the embedded plane can treat as it must."""
    yield "    acl needs_activator query -m sub model="  # which counts before the body
    yield "    acl needs_activator path -m str /v1/models"
    yield "    acl needs_activator path -m beg /v1/models/"
    yield "    acl needs_activator req.hdr(transfer-encoding) -m found"  # whose size is counted as it arrives
    yield "    acl plain_connection req.hdr_cnt(connection) eq 0"  # or one that names no header of its own
    yield r"    acl plain_connection req.fhdr(connection) -m reg -i '^(\s*(close|keep-alive|upgrade|te)\s*,?)+$'"
    for model in settings.models:
        for probe in model.probes:
            yield f"    acl needs_activator path -m str {_quoted(probe.path)}"


def _backend(settings: Settings, model: Model) -> list[str]:
    parts = urlsplit(model.upstream)
    tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if tls else 80)
    address = f"[{host}]" if ":" in host else host
    words = [f"{address}:{port}"]
    if model.concurrency:
        words += ["maxconn", str(model.concurrency), "maxqueue", str(model.queue.count)]
    if tls:
        words += ["ssl", "verify", "required", "ca-file", "@system-ca", "sni", "req.hdr(host)"]
    if parts.scheme == "h2":
        words += ["proto", "h2"]
    name = backend_of(model.name)
    return [
        f"backend {name}",
        f"    timeout queue {_ms(model.queue.age)}",
        f"    retries {max(1, min(int(model.queue.age), 1000))}",  # one a second while its port refuses
        f"    server model {' '.join(words)}",
        *_added(settings.haproxy.extra_backends.get(model.name, ())),
    ]


def _is_http(model: Model) -> bool:
    return not model.upstream.startswith("tcp:") and not urlsplit(model.upstream).path


def _ms(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _quoted(text: str) -> str:
    """Return a text as one word of HAProxy's: nothing in it is a variable, a comment or the end of a line."""
    return "'" + text.replace("'", "'\\''").replace("\n", " ").replace("\r", " ") + "'"


def _added(lines: tuple[str, ...]) -> list[str]:
    return [f"    {line}" for line in lines]
