"""Metrics of the proxy, `kybernate_proxy_*`, which exist for models that sleep as well; and the access log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.proxy.engine import Engine
from kybernate.proxy.holding import Phase
from kybernate.proxy.record import Record, code_of

SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts requests, wakes and suspends. `models` are all there are, so that none is missing while it sleeps."""

    def __init__(self, models: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kybernate_proxy_requests", "Requests that have ended", ["model", "code", "cold"], registry=self.registry
        )
        self._refused = Counter(
            "kybernate_proxy_refused", "Requests that the proxy answered itself", ["model", "reason"],
            registry=self.registry,
        )  # fmt: skip
        self._first = Histogram(
            "kybernate_proxy_first_byte_seconds", "Seconds until an answer began", ["model", "cold"], buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._waited = Histogram(
            "kybernate_proxy_wait_seconds", "Seconds that requests were held", ["model"], buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._sent = Counter("kybernate_proxy_sent_bytes", "Bytes of answers", ["model"], registry=self.registry)
        self._wakes = Counter("kybernate_proxy_wakes", "Wakes", ["model", "outcome"], registry=self.registry)
        self._wake_seconds = Histogram(
            "kybernate_proxy_wake_seconds", "Seconds of wakes", ["model"], buckets=SECONDS, registry=self.registry
        )
        self._suspends = Counter("kybernate_proxy_suspends", "Suspends", ["model", "outcome"], registry=self.registry)
        for name in models:
            self._first.labels(name, "no")
            self._waited.labels(name)
            self._sent.labels(name)
            for outcome in ("woken", "failed"):
                self._wakes.labels(name, outcome)

    def ended(self, record: Record) -> None:
        """Count a request that has ended."""
        model, cold = record.model or "-", "yes" if record.cold else "no"
        self._requests.labels(model, str(code_of(record)), cold).inc()
        if record.reason:
            self._refused.labels(model, record.reason).inc()
        if record.answered:
            self._first.labels(model, cold).observe(record.answered - record.started)
        if record.waited:
            self._waited.labels(model).observe(record.waited)
        if record.sent:
            self._sent.labels(model).inc(record.sent)

    def woke(self, name: str, outcome: str, seconds: float) -> None:
        self._wakes.labels(name, outcome).inc()
        self._wake_seconds.labels(name).observe(seconds)

    def suspended(self, name: str, outcome: str, seconds: float) -> None:
        self._suspends.labels(name, outcome).inc()

    def text(self) -> bytes:
        """Return all of them in Prometheus' form."""
        return generate_latest(self.registry)


class States(Collector):
    """What is held now, read when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        phases = GaugeMetricFamily("kybernate_proxy_model_state", "1 for the state it is in", labels=["model", "state"])
        waiting = GaugeMetricFamily("kybernate_proxy_waiting", "Requests that are held", labels=["model"])
        held_bytes = GaugeMetricFamily("kybernate_proxy_held_bytes", "Bytes of their bodies", labels=["model"])
        in_flight = GaugeMetricFamily("kybernate_proxy_in_flight", "Requests passed on", labels=["model"])
        for name, held in self._engine.held.items():
            for phase in Phase:
                phases.add_metric([name, phase], float(held.phase == phase))
            waiting.add_metric([name], len(held.waiting))
            held_bytes.add_metric([name], held.bytes)
            in_flight.add_metric([name], max(held.in_flight, held.elsewhere))
        yield from (phases, waiting, held_bytes, in_flight)


class AccessLog:
    """A line of JSON for each request, appended to a file; SIGHUP opens it again, for rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def reopen(self) -> None:
        old, self._fd = self._fd, os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        os.close(old)

    def ended(self, record: Record) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": record.id,
            "client": record.client,
            "owner": record.owner,
            "method": record.head.method,
            "host": record.head.host,
            "path": record.head.path[:512],
            "model": record.model,
            "status": code_of(record),
            "reason": record.reason,
            "bytes": record.sent,
            "waited_ms": round(record.waited * 1000, 1),
            "cold": record.cold,
            "ms": round((time.monotonic() - record.started) * 1000, 1),
        }
        try:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
        except OSError:
            pass  # a full disk ends no request
