"""Proxy, HAProxy, agent, shim daemons and containers are killed in turn, while requests are answered by two models.

One model is awake all the time, the other one sleeps between its requests. KYBERNATE_SCALE=full has this for minutes,
with as many requests as a production model gets; without it, for seconds. A machine that does not keep up gets fewer:
what is asserted needs no speed.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import node_agent
from tests.system.checkpoints import kybernate, shim_of
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.serving import serving
from tests.system.node_agent import NodeAgent
from tests.system.proxy_load import Tally, loading
from tests.system.proxy_process import ProxyProcess, free_port, running

FULL = os.environ.get("KYBERNATE_SCALE") == "full"
SECONDS = 60 if FULL else 12  # of each victim
pytestmark = pytest.mark.timeout(900 if FULL else 240)
RATES = {"busy": 200.0, "sleepy": 2.0} if FULL else {"busy": 100.0, "sleepy": 2.0}
MODEL = "retry_after: 1s, queue: {count: 100000}"  # room for what comes while a busy machine restores
AT_WORK = frozenset({"RUNNING", "PAUSED"})
CHECKPOINTS = Path("/var/lib/kybernate/checkpoints")


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    with node_agent.running(place) as running:
        monkeypatch.setenv("KYBERNATE_AGENT", running.address.removeprefix("unix:"))
        yield running


@contextmanager
def restorable(ctr: Ctr, port: int) -> Iterator[str]:
    """A container that answers, with an image that it is made of again when it is gone."""
    with serving(ctr, port, flags=["--null-io"]) as id:
        try:
            kybernate("checkpoint", id, id)
            kybernate("label", id, f"kybernate.io/wake={id}")
            yield id
        finally:
            shutil.rmtree(CHECKPOINTS / id, ignore_errors=True)


@dataclass
class Node:
    """What is killed. Each method kills one, and returns once it, or what takes its place, is there again."""

    ctr: Ctr
    agent: NodeAgent
    proxy: ProxyProcess
    containers: dict[str, str]  # by their models

    def kill_proxy(self) -> None:
        self.proxy.kill()
        self.proxy.start()
        self.settle()

    def settle(self) -> None:
        """Wait until HAProxy, where there is one, passes what it can by itself."""
        if self.proxy.haproxy():
            eventually(lambda: self.proxy.passes("busy"), seconds=60)

    def kill_haproxy(self) -> None:
        before = self.proxy.haproxy()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: self.proxy.haproxy() not in (0, before))

    def kill_agent(self) -> None:
        assert self.agent.process is not None
        self.agent.process.kill()
        self.agent.process.wait(20)
        self.agent.start()
        self.agent.wait_ready()

    def kill_shims(self) -> None:
        self._kill_containers(lambda id: shim_of(self.ctr, id).pid)

    def kill_containers(self) -> None:
        self._kill_containers(self.ctr.pid)

    def _kill_containers(self, victim: Callable[[str], int]) -> None:
        for id in self.containers.values():
            before = eventually(lambda id=id: self._pid_at_work(id), seconds=60)  # type: ignore[misc]
            os.kill(victim(id), signal.SIGKILL)
            eventually(lambda id=id, before=before: self._pid_at_work(id) not in (0, before), seconds=60)  # type: ignore[misc]

    def _pid_at_work(self, id: str) -> int:
        """Return the process of a container, 0 while there is none or it is being restored."""
        pid, status = self.ctr.tasks().get(id, (0, ""))
        return pid if status in AT_WORK else 0


KILLS: dict[str, Callable[[Node], None]] = {
    "proxy": Node.kill_proxy,
    "haproxy": Node.kill_haproxy,
    "agent": Node.kill_agent,
    "shim": Node.kill_shims,
    "container": Node.kill_containers,
}


def wait_for_answers(tally: Tally) -> None:
    """Wait until each model has answered once more."""
    before = tally.whole.copy()
    eventually(lambda: all(tally.whole[model] > before[model] for model in RATES), seconds=60)


@pytest.mark.parametrize("plane", ["embedded", "haproxy"])
def test_requests_end_well_whatever_is_killed(ctr: Ctr, gpus: Gpus, agent: NodeAgent, place: Path, plane: str) -> None:
    ports = {"busy": free_port(), "sleepy": free_port()}
    with ExitStack() as stack:
        containers = {model: stack.enter_context(restorable(ctr, port)) for model, port in ports.items()}
        models = {
            model: f"container: {containers[model]}, upstream: 'http://127.0.0.1:{port}', {MODEL}"
            for model, port in ports.items()
        }
        settings = f"plane: {plane}\nlimits: {{per_client: 0}}\nagent: {{address: '{agent.address}'}}\n"
        settings += f"models: {{busy: {{{models['busy']}}}, sleepy: {{{models['sleepy']}, idle: 200ms}}}}\n"
        proxy = stack.enter_context(running(ProxyProcess(place, settings)))
        node, found = Node(ctr, agent, proxy, containers), dict[str, Tally]()
        with loading(proxy.url, RATES, f"http://127.0.0.1:{ports['busy']}/") as load:
            wait_for_answers(load.tally)
            node.settle()
            tally = load.begin()
            for victim, kill in KILLS.items():
                if victim == "haproxy" and plane == "embedded":
                    continue
                found[victim], kills, end = Tally(), 0, time.monotonic() + SECONDS
                while time.monotonic() < end:
                    wait_for_answers(tally)
                    kill(node)
                    kills += 1
                    before, tally = tally, load.begin()
                    load.complete(before)  # lest what the next kill does is taken for this one's, or ends its hang
                    found[victim].add(before)
                print(f"{plane}: {victim} killed {kills} times")
        for victim, tally in found.items():
            print(f"{plane}: {victim}: {tally}")
        print(*(line for line in proxy.log.read_text().splitlines() if "_failed" in line), sep="\n")
        for victim, tally in found.items():
            assert not tally.hung, f"{victim}: {tally.hung}"
            assert not tally.wrong, f"{victim}: {tally.wrong}"
            assert set(tally.whole) == {"busy", "sleepy"}, f"{victim}: {tally}"
        assert (found["agent"].cut, found["agent"].repeats) == ({}, {}), "no request needs the agent to go on"
        if plane == "haproxy":
            awake = found["proxy"]
            assert (awake.cut["busy"], [key for key in awake.repeats if key[0] == "busy"]) == (0, []), str(awake)
