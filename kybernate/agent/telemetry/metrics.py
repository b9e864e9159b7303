"""The agent's metrics for Prometheus, in a registry of their own.

Counters rise with what happens; gauges are read from what the agent knows when Prometheus asks, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kybernate.agent.telemetry.scraping import Rendered, Scraping
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.node.lookup import gpu_word
from kybernate.node.words import word
from kybernate_shim import __version__

SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
ANSWER_SECONDS: Final = 5.0  # the event loop answers in milliseconds, or is stopping
GPU: Final = (("total", "memory of the GPU"), ("used", "of it in use"), ("free", "of it free"))
TIER: Final = (("capacity", "size of the tier"), ("used", "of it in use by images"), ("free", "of it free"))


class Metrics:
    """What is counted. `ended` is called once for each operation that ends."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._operations = Counter(
            "kybernate_operations", "operations that have ended", ["verb", "state"], registry=self.registry
        )
        self._seconds = Histogram(
            "kybernate_operation_step_seconds",
            "duration of the steps of operations that have ended",
            ["verb", "step"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._bytes = Counter(
            "kybernate_operation_bytes", "bytes that steps have moved", ["verb", "step"], registry=self.registry
        )
        Info("kybernate_build", "release of the agent", registry=self.registry).info({"version": __version__})

    def ended(self, operation: wire.Operation) -> None:
        """Count an operation and its steps."""
        state = word(wire.OperationState, operation.state)
        self._operations.labels(operation.verb, state).inc()
        for step in operation.steps:
            self._seconds.labels(operation.verb, step.name).observe(step.seconds)
            self._bytes.labels(operation.verb, step.name).inc(step.bytes)

    async def serve(self, listen: str, hub: Hub) -> tuple[Scraping, int]:
        """Answer Prometheus on HOST:PORT until what is returned is closed; return the port, too.

        Raises Failure.
        """
        self.registry.register(Gauges(hub, asyncio.get_running_loop()))
        host, _, port = listen.rpartition(":")
        scraping = Scraping(self._rendered)
        try:
            return scraping, await scraping.listen(host.strip("[]"), int(port))
        except OSError as error:
            raise Failure(
                f"cannot serve metrics on {listen}: {error}", advice="correct `metrics.listen` in agent.toml"
            ) from error

    def _rendered(self, accept: str) -> Rendered:
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind


@dataclass(eq=False)
class Gauges(Collector):
    """What the hub knows now. Asked from Prometheus' threads; the hub is looked at on the event loop's."""

    hub: Hub
    loop: asyncio.AbstractEventLoop

    def collect(self) -> Iterator[GaugeMetricFamily]:
        looking = asyncio.run_coroutine_threadsafe(self._looked(), self.loop)
        return iter(looking.result(ANSWER_SECONDS))

    def describe(self) -> Sequence[GaugeMetricFamily]:
        """Return nothing: what there is shows when it is asked for."""
        return ()

    async def _looked(self) -> list[GaugeMetricFamily]:
        gpus, tiers, operations = map(self.hub.objects, ("gpu", "tier", "operation"))
        active = Count(one.verb for one in operations if one.state in (wire.PENDING, wire.RUNNING, wire.CANCELLING))
        containers = Count(gpu_word(one.gpu) or "none" for one in self.hub.objects("container") if not one.sandbox)
        return [
            *(_sizes("gpu", name, text, gpus, ("uuid", "model")) for name, text in GPU),
            *(_sizes("tier", name, text, tiers, ("name",)) for name, text in TIER),
            _counted("tier_images", "images in the tier", "name", {one.name: one.images for one in tiers}),
            _counted("operations_active", "operations that have not ended", "verb", active),
            _counted("containers", "containers by the state of their GPU memory", "gpu", containers),
        ]


def _sizes(kind: str, name: str, text: str, objects: Sequence[Any], labels: Sequence[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kybernate_{kind}_{name}_bytes", text, labels=labels)
    for one in objects:
        family.add_metric([getattr(one, label) for label in labels], getattr(one, f"{name}_bytes"))
    return family


def _counted(name: str, text: str, label: str, numbers: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kybernate_{name}", text, labels=[label])
    for value, number in sorted(numbers.items()):
        family.add_metric([value], number)
    return family
