"""Two proxies before one agent, one of them on another machine: by the agent's TLS alone, and killed at work."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import node_agent
from tests.system.ctr import Ctr, eventually, run
from tests.system.gpu.serving import serving
from tests.system.node_agent import NodeAgent
from tests.system.proxy_process import ProxyProcess, free_port, running
from tests.unit.agent.access.authority import Authority

HERE, THERE, LINK = "10.177.0.1", "10.177.0.2", "second-machine"
PORT = 7445
LIMIT = 4  # requests that the model has at one time, from both proxies together


@pytest.fixture
def machine() -> Iterator[Sequence[str]]:
    """Yield the command that runs another one on a second machine: its network is its own, and so is /run."""
    holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /run; echo; exec cat"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    inside = ["nsenter", f"--target={holder.pid}", "--net", "--mount", "--wd=/", "--"]
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        run(["ip", "link", "add", LINK, "type", "veth", "peer", "name", "first", "netns", str(holder.pid)])
        run(["ip", "address", "add", f"{HERE}/30", "dev", LINK])
        run(["ip", "link", "set", LINK, "up"])
        for words in (f"address add {THERE}/30 dev first", "link set first up", "link set lo up"):
            run([*inside, "ip", *words.split()])
        yield inside
    finally:
        holder.kill()
        holder.communicate()
        eventually(lambda: not Path(f"/sys/class/net/{LINK}").exists())


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def authority(place: Path) -> Authority:
    """The CA of agent and proxies, and the agent's own certificate."""
    authority = Authority()
    authority.write(place, "node-1.example")
    return authority


@pytest.fixture
def agent(place: Path, authority: Authority, machine: Sequence[str]) -> Iterator[NodeAgent]:
    settings = (
        f'[tls]\nlisten = "{HERE}:{PORT}"\ncertificate = "{place}/certificate"\nkey = "{place}/key"\n'
        f'client_ca = "{place}/client_ca"\nproxies = ["*.proxies.example"]\n'
    )
    with node_agent.running(place, settings) as running:
        yield running


def proxy_of(
    place: Path, authority: Authority, name: str, listen: str, settings: str, **options: object
) -> ProxyProcess:
    """A proxy with a certificate of its own, and no other way to the agent."""
    own = place / name
    own.mkdir()
    authority.write(own, f"{name}.proxies.example")
    tls = f"ca: {own}/client_ca, certificate: {own}/certificate, key: {own}/key, server_name: node-1.example"
    return ProxyProcess(own, f"agent: {{address: '{HERE}:{PORT}', {tls}}}\n{settings}", listen, **options)  # type: ignore[arg-type]


def ask(url: str, number: int, pause: float = 0) -> list[int]:
    """Return the numbers of an answer's events."""
    body = json.dumps({"model": "tiny", "number": number, "pause": pause}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [int(line.removeprefix(b"data: ")) for line in answer.read().split(b"\n") if line]


def resumed(agent: NodeAgent, times: int) -> bool:
    return len(agent.lines("container.resumed")) == times


class Model:
    """What the model says of itself, past all proxies."""

    def __init__(self, port: int) -> None:
        self._url = f"http://{HERE}:{port}/"
        self.most = 0  # requests at one time, since the beginning

    def at_work(self) -> int:
        with urllib.request.urlopen(self._url, timeout=60) as answer:
            said = json.loads(answer.read())
        self.most = max(self.most, said["most"])
        return int(said["at_work"])


@contextmanager
def asking(url: str, clients: int, first: int) -> Iterator[list[str]]:
    """Ask without a pause while the block runs, by numbers from `first` on; yield what has failed.

    A client that gets no answer asks no more.
    """
    ended, failed, numbers = threading.Event(), list[str](), itertools.count(first)

    def client() -> None:
        while not ended.is_set():
            number = next(numbers)
            try:
                assert ask(url, number, 0.1) == [number * 10 + step for step in range(3)]
            except (OSError, HTTPException, AssertionError) as error:
                failed.append(f"{type(error).__name__}: {error}")
                return

    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(client)
        try:
            yield failed
        finally:
            ended.set()


@pytest.mark.parametrize("plane", ["embedded", "haproxy"])
def test_two_proxies_wake_once_share_the_limit_and_one_that_is_killed_leaves_its_share(
    ctr: Ctr, gpus: Gpus, agent: NodeAgent, place: Path, authority: Authority, machine: Sequence[str], plane: str
) -> None:
    port, numbers = free_port(), range(1, 33)  # each has a place of its own on the GPU
    with serving(ctr, port, host=HERE) as container:
        upstream = f"container: {container}, upstream: 'http://{HERE}:{port}', idle: 300ms, concurrency: {LIMIT}"
        settings = f"plane: {plane}\nmodels: {{tiny: {{{upstream}}}}}\n"
        near = proxy_of(place, authority, "near", f"{HERE}:{free_port()}", settings)
        far = proxy_of(place, authority, "far", f"{THERE}:{free_port()}", settings, argv=machine)
        model = Model(port)
        with running(near), running(far):
            for wakes in (1, 2):
                eventually(lambda: gpus.used() == [0, 0], seconds=40)
                with ThreadPoolExecutor(len(numbers)) as clients:
                    answers = [clients.submit(ask, (near, far)[number % 2].url, number) for number in numbers]
                assert [one.result()[0] for one in answers] == [number * 10 for number in numbers]
                eventually(partial(resumed, agent, wakes))

            with asking(near.url, 2 * LIMIT, 1) as failed:
                with asking(far.url, 2 * LIMIT, 1 << 20) as cut:
                    eventually(lambda: model.at_work() == LIMIT)
                    far.vanish()
                    eventually(lambda: len(cut) == 2 * LIMIT)
                eventually(lambda: model.at_work() == LIMIT, seconds=40)
            assert failed == []
            assert model.most == LIMIT
            eventually(lambda: gpus.used() == [0, 0], seconds=60)
            assert ask(near.url, 1) == [10, 11, 12]
