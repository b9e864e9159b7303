"""Spans of requests that HAProxy passes by itself: it chooses their identifiers, and says in a line how they ended.

The lines are datagrams to a socket of the proxy's. HAProxy never waits for it: what does not fit is lost, as spans are
that a collector does not take.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kybernate.proxy.record import Record, Trace
from kybernate.proxy.routing import Head
from kybernate.proxy.tracing import Export, Traces

MOST_LINE: Final = 4096
AT_ONCE: Final = 256  # lines that are read before others have their turn
PARENT: Final = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
NO_TRACE, NO_SPAN = "-00000000000000000000000000000000-", "-0000000000000000-"
SAMPLED: Final = "[13579bdf]$"
OF_A_MILLION: Final = 1_000_000
FIELDS: Final = (
    "%[var(txn.trace)]", "%[var(txn.own)]", "%[var(txn.onward)]", "%[var(txn.parent)]", "%[var(txn.began)]",
    "%Tw", "%Tc", "%Tr", "%Td", "%ST", "%ts", "%B", "%b", "%[var(txn.id)]", "%ci", "%HM", "%[var(txn.host)]",
    "%HPO",
)  # fmt: skip
CLIENT_LEFT: Final = "C"  # the first letter of a termination state, for a connection that the client has closed


def log_lines(place: Path) -> Iterator[str]:
    """Yield the lines of a frontend that has its own log for this; only requests that are sampled are in it."""
    yield f"    log unix@{place} len {MOST_LINE} format raw local0"
    yield f'    log-format "{" ".join(FIELDS)}"'
    yield "    http-request set-log-level silent"


def trace_lines(export: Export, goes: str) -> Iterator[str]:
    """Yield what continues the trace of a request that meets `goes`, or begins one, as the embedded plane does."""
    came, one = "{ var(txn.came) -m found }", "{ req.fhdr_cnt(traceparent) eq 1 }"
    usable = f"{one} {{ req.hdr(traceparent) -m reg {PARENT} }}"
    zeros = " ".join(f"!{{ req.hdr(traceparent) -m sub -- {none} }}" for none in (NO_TRACE, NO_SPAN))
    yield f"    http-request set-var(txn.traced) int(1) if {goes}"
    traced = "{ var(txn.traced) -m found }"
    yield f"    http-request set-var(txn.came) req.hdr(traceparent) if {traced} {usable} {zeros}"
    yield f"    http-request set-var(txn.began) date(0,us) if {traced}"
    yield f"    http-request set-var(txn.host) req.hdr(host),lower if {traced}"
    yield f"    http-request set-var-fmt(txn.trace) {_random(1, 2, 3, 4, 5)} if {traced} !{came}"
    yield f"    http-request set-var(txn.trace) var(txn.came),field(2,-) if {traced} {came}"
    yield f"    http-request set-var(txn.parent) var(txn.came),field(3,-) if {traced} {came}"
    for name in ("own", "onward"):
        yield f"    http-request set-var-fmt(txn.{name}) {_random(5, 2)} if {traced}"
    drawn = f"{{ rand({OF_A_MILLION}) lt {round(export.share * OF_A_MILLION)} }}"
    yield f"    http-request set-var(txn.flags) str(00) if {traced}"
    yield f"    http-request set-var(txn.flags) str(01) if {traced} {f'!{came} ' if export.parent else ''}{drawn}"
    if export.parent:
        theirs = f"{{ var(txn.came),field(4,-) -m reg {SAMPLED} }}"
        yield f"    http-request set-var(txn.flags) str(01) if {traced} {came} {theirs}"
    onward = "00-%[var(txn.trace)]-%[var(txn.onward)]-%[var(txn.flags)]"
    yield f"    http-request set-header traceparent {onward} if {traced}"
    yield f"    http-request del-header tracestate if {traced} !{came}"
    yield f"    http-request set-log-level info if {traced} {{ var(txn.flags) -m str 01 }}"


def _random(*fields: int) -> str:
    """Return random hexadecimal digits: fields of a UUID have 8, 4, 4, 4 and 12."""
    return "".join(f"%[uuid(),field({number},-)]" for number in fields)


def record_of(line: str, models: Mapping[str, str], *, now: float, clock: float) -> tuple[Record, float] | None:
    """Return a request that has ended, and when; None for a line that is none of a request of a model.

    `models` are names by backends. `now` is the monotonic clock, `clock` the other one, both in seconds.
    """
    words = line.strip().split(" ", len(FIELDS) - 1)
    if len(words) < len(FIELDS) or words[12] not in models:
        return None
    trace_id, own, onward, parent, began, *numbers = words[:10]
    state, sent, backend, id, client, method, host, path = words[10:]
    try:
        trace = Trace(int(trace_id, 16), int(own, 16), int(onward, 16), 0 if parent == "-" else int(parent, 16), True)
        queued, connected, answered, moved = (max(0, int(one)) / 1000 for one in numbers[:4])
        started, status, size = now - clock + int(began) / 1e6, int(numbers[4]), int(sent)
    except ValueError:
        return None
    record = Record(id=id, client=client, head=Head(method, host, path, {}), api="", started=started, trace=trace)
    record.model, record.status, record.sent = models[backend], max(0, status), size
    record.passed = started + queued
    if queued:
        record.held_since, record.held_until, record.waited = started, record.passed, queued
    if int(numbers[2]) >= 0:
        record.answered = record.passed + connected + answered
    if state.startswith(CLIENT_LEFT):
        record.reason = "client_gone"
    elif state != "--":
        record.reason = "upstream_broke" if record.answered else "upstream_failed"
    return record, record.passed + connected + answered + moved


class TraceLines:
    """Takes HAProxy's lines from a socket, and has their spans exported."""

    def __init__(self, place: Path, models: Mapping[str, str], traces: Traces) -> None:
        place.unlink(missing_ok=True)
        self._models, self._traces = models, traces
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(str(place))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                line = self._socket.recv(MOST_LINE)
            except BlockingIOError:
                return
            found = record_of(line.decode("utf-8", "replace"), self._models, now=time.monotonic(), clock=time.time())
            if found is not None:
                self._traces.ended(found[0], found[1])

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
