"""What the agent costs on a node with many containers, and how soon a watcher hears of a change.

The figures have bars of their own and nothing to be compared with: `stock` is the bar. The agent has all that it can
have: journal, registry, the sockets for users, certificates and containers, and metrics. One client watches everything.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil

from kybernate.messages import agent_pb2 as api
from kybernate.messages import events_pb2, events_pb2_grpc
from kybernate.node.containerd import Containerd
from kybernate_shim.messages import events_pb2 as shim_events
from tests.bench.figures import Pair
from tests.system import gpu
from tests.system.ctr import Ctr, eventually, run
from tests.system.node_agent import NodeAgent
from tests.system.watcher import Watcher
from tests.unit.agent.access.authority import Authority

CONTAINERS = 200
SIDE_BY_SIDE = 4
MOST_CPU, MOST_MIB, MOST_MS = 1.0, 120.0, 50.0  # percent of a core; MiB; milliseconds at the median
IDLE_SECONDS = 30.0
CHANGES = 40
NAMES = ("agent.idle_cpu", "agent.rss", "agent.watch_latency")
TLS_PORT, METRICS_PORT = 7443, 7444
MIB = 1 << 20


def pairs() -> Iterator[Pair]:
    """Yield the figures, which are measured together, once."""
    measured: dict[str, float] = {}

    def cost(name: str) -> float:
        if not measured:
            measured.update(_measure())
        return measured[name]

    for name, unit, most in zip(NAMES, ("%", "MiB", "ms"), (MOST_CPU, MOST_MIB, MOST_MS), strict=True):
        yield Pair(name, partial(cost, name), partial(float, most), 1.0, unit, within=CONTAINERS)


def _measure() -> dict[str, float]:
    directory = Path(tempfile.mkdtemp(prefix="agent-", dir="/tmp"))  # a socket's address is short
    ctr = Ctr()
    try:
        with (
            _sleepers(ctr, CONTAINERS) as ids,
            _agent(directory) as agent,
            closing(Watcher(agent.address)) as watcher,
        ):
            eventually(lambda: _all_seen(watcher, ids), seconds=60)
            eventually(lambda: agent.lines("registry.updated"))
            agent.call("Inventory", "GetNode", api.GetNodeRequest())
            cpu = _idle_cpu(agent)
            latency = _median(_latencies(ctr, watcher, ids[:CHANGES]))
            return {NAMES[0]: cpu, NAMES[1]: _process(agent).memory_info().rss / MIB, NAMES[2]: latency}
    finally:
        shutil.rmtree(directory)
        gpu.forget_helper()


@contextmanager
def _sleepers(ctr: Ctr, count: int) -> Iterator[list[str]]:
    ids = [ctr.new_id() for _ in range(count)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            list(pool.map(lambda id: run(ctr.run_argv(id, "sleep", "10000", flags=["-d"])), ids))
            yield ids
        finally:
            list(pool.map(ctr.remove, ids))


def _all_seen(watcher: Watcher, ids: Sequence[str]) -> bool:
    return all(watcher.states(id)[0] == "running" for id in ids)


@contextmanager
def _agent(directory: Path) -> Iterator[NodeAgent]:
    agent = NodeAgent(directory, _everything(directory))
    agent.start()
    try:
        agent.wait_ready()
        yield agent
    finally:
        agent.stop(signal.SIGKILL)


def _everything(directory: Path) -> str:
    """Return settings with all listeners, whose certificate is in the directory."""
    Authority().write(directory, "localhost")
    return f"""[tls]
listen = "127.0.0.1:{TLS_PORT}"
certificate = "{directory}/certificate"
key = "{directory}/key"
client_ca = "{directory}/client_ca"
[self_socket]
enabled = true
path = "{directory}/own/agent.sock"
[metrics]
listen = "127.0.0.1:{METRICS_PORT}"
"""


def _process(agent: NodeAgent) -> psutil.Process:
    assert agent.process is not None
    return psutil.Process(agent.process.pid)


def _idle_cpu(agent: NodeAgent) -> float:
    """Return the percentage of a core that the agent uses while nothing happens, and a client follows."""
    process = _process(agent)
    time.sleep(5)  # what the start has left to do
    before, begin = process.cpu_times(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    after, seconds = process.cpu_times(), time.monotonic() - begin
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def _latencies(ctr: Ctr, watcher: Watcher, ids: Sequence[str]) -> list[float]:
    """Return the milliseconds from a shim's event of a pause to the watcher's message about it."""
    with Containerd() as containerd:
        stream = events_pb2_grpc.EventsStub(containerd.channel).Subscribe(
            events_pb2.SubscribeRequest(filters=['topic=="/tasks/paused"'])
        )
        sent: dict[str, float] = {}
        reading = threading.Thread(target=_read, args=(stream, sent), daemon=True)
        reading.start()
        for id in ids:
            ctr("task", "pause", id)
            eventually(lambda: watcher.states(id)[0] == "paused", pause=0.01)  # noqa: B023  # asked immediately
        eventually(lambda: len(sent) >= len(ids) - 1)  # the first may be before the subscription stands
        stream.cancel()
        reading.join(10)
    heard = {one.id: when for when, one in reversed(watcher.heard) if getattr(one, "state", "") == "paused"}
    return [1000 * (heard[id] - when) for id, when in sent.items()]


def _read(stream: Any, sent: dict[str, float]) -> None:
    with suppress(grpc.RpcError):
        for envelope in stream:
            id = shim_events.TaskPaused.FromString(envelope.event.value).container_id
            sent[id] = envelope.timestamp.ToNanoseconds() / 1e9


def _median(values: Sequence[float]) -> float:
    print(f"watch latency of {len(values)} changes: at most {max(values):.1f} ms", flush=True)
    return statistics.median(values)
