"""A request wakes a real container on a pretended GPU, and an idle one is suspended again, by agent and shim."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import node_agent
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.serving import serving
from tests.system.node_agent import NodeAgent
from tests.system.proxy_process import free_port, proxying, wakes


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    with node_agent.running(place) as running:
        yield running


def settings(container: str, port: int, plane: str) -> str:
    model = f"container: {container}, upstream: 'http://127.0.0.1:{port}', idle: 300ms"
    return f"plane: {plane}\nmodels: {{tiny: {{{model}}}}}\n"


def ask(url: str, number: int) -> tuple[list[int], str | None]:
    """Return the numbers of the answer's events, and how long it says that the wake took."""
    body = json.dumps({"model": "tiny", "number": number}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line.removeprefix(b"data: ") for line in answer.read().split(b"\n") if line]
        return [int(event) for event in events], answer.headers["X-Kybernate-Wake-Ms"]


@pytest.mark.parametrize("plane", ["embedded", "haproxy"])
def test_requests_wake_a_container_and_idle_suspends_it(
    ctr: Ctr, gpus: Gpus, agent: NodeAgent, place: Path, plane: str
) -> None:
    port = free_port()
    with serving(ctr, port) as container, proxying(place, agent, settings(container, port, plane)) as url:
        for number in range(1, 4):
            eventually(lambda: gpus.used() == [0, 0], seconds=40)
            numbers, wake_ms = ask(url, number)
            assert numbers == [number * 10 + step for step in range(3)]
            assert wake_ms is not None
        eventually(lambda: gpus.used() == [0, 0], seconds=40)
        before = wakes(agent)
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda number: ask(url, number), range(32)))
        assert [numbers[0] for numbers, _ in answers] == [number * 10 for number in range(32)]
        assert wakes(agent) == before + 1
