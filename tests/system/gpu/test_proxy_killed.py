"""What is killed under load: proxy, HAProxy, agent, shim daemon and container, each in turn, and one of two proxies.

A client here does what those of OpenAI's API do: it repeats a request that was refused with 503, or whose connection
broke before a byte of its answer. What fails then had reached the model, whose log says so, and is counted. Nothing
hangs. KYBERNATE_KILLS=300 has the load last for so many seconds, with a kill every few of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kybernate.messages import agent_pb2 as wire
from tests.fakes.cuda import Gpus
from tests.system import gpu, node_agent
from tests.system.checkpoints import PYTHON, shim_of
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.test_proxy import free_port
from tests.system.gpu.toolkit import visible
from tests.system.node_agent import NodeAgent
from tests.unit.agent.access.authority import Authority

PER_SECOND = 200
SECONDS = 3.0
LONG = float(os.environ.get("KYBERNATE_KILLS", "0"))
DEADLINE = 90.0  # of a request with all its repetitions: what takes longer hangs
# Notes each request before its answer begins; sends `steps` events, each of which needs the GPU, `pause` seconds apart.
SERVER = """
import ctypes, json, os, socketserver, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: {result}"
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(16 << 20))
log = os.open("/log/begun", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
running, most, lock = 0, 0, threading.Lock()
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        global running, most
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            running += 1
            if running > most:
                most = running
                os.write(log, b"most %d\\n" % most)
        os.write(log, b"%d\\n" % asked["number"])
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            call("cuCtxSetCurrent", context)
            for step in range(asked.get("steps", 1)):
                if step:
                    time.sleep(asked["pause"])
                sent, back = ctypes.c_uint64(asked["number"] * 10 + step), ctypes.c_uint64()
                place = ctypes.c_uint64(memory.value + 8 * (asked["number"] % 1000))
                call("cuMemcpyHtoD_v2", place, ctypes.byref(sent), ctypes.c_size_t(8))
                call("cuMemcpyDtoH_v2", ctypes.byref(back), place, ctypes.c_size_t(8))
                self.wfile.write(b"data: %d\\n\\n" % back.value)
                self.wfile.flush()
            self.wfile.write(b"data: end\\n\\n")
        except OSError:
            pass
        finally:
            with lock:
                running -= 1
        self.close_connection = True
    def log_message(self, *words):
        pass
class Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True
    def handle_error(self, request, address):
        pass
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    with node_agent.running(place) as running:
        yield running


@dataclass
class Proxy:
    """A proxy as a process, which a test kills and starts again as its service manager would."""

    place: Path
    plane: str
    port: int
    admin: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.place / "proxy.log"

    def start(self) -> None:
        known = self.started()
        command = [sys.executable, "-c", "from kybernate.cli import main; main()", "proxy", "--config",
                   str(self.place / "proxy.yaml")]  # fmt: skip
        with self.log.open("ab") as output:
            environment = {**os.environ, "PYTHONPATH": ""}
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd="/", env=environment)
        eventually(lambda: self.started() > known, seconds=40)
        eventually(lambda: self.state() is not None, seconds=40)

    def started(self) -> int:
        return self.log.read_text().count("proxy.started") if self.log.exists() else 0

    def state(self) -> dict[str, Any] | None:
        """Return what it says of the model; None before the agent has said anything."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/state", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)["tiny"]
            return found if found["state"] != "absent" or found["failure"] else None

    def suspend(self) -> None:
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{self.admin}/suspend/tiny", method="POST"), timeout=10
        ).close()

    def haproxy(self) -> list[psutil.Process]:
        """Return the HAProxys that read this proxy's configuration."""
        found = psutil.process_iter(["name", "cmdline"])
        return [one for one in found if one.info["name"] == "haproxy" and f"{self.place}/" in str(one.info["cmdline"])]

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(40)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for one in self.haproxy():
            one.kill()
        print(self.log.read_text()[-3000:] if self.log.exists() else "no log")


@contextmanager
def proxying(
    place: Path, container: str, port: int, plane: str, *, agent: str, more: str = "", top: str = ""
) -> Iterator[Proxy]:
    place.mkdir()
    one = Proxy(place, plane, free_port(), free_port())
    (place / "proxy.yaml").write_text(
        f"listen: 127.0.0.1:{one.port}\nadmin: 127.0.0.1:{one.admin}\nplane: {plane}\n{agent}\n{top}\n"
        f"haproxy: {{state: {place}/haproxy}}\nlimits: {{per_client: 0}}\n"
        f"models: {{tiny: {{container: {container}, upstream: 'http://127.0.0.1:{port}', queue: {{count: 4096}},"
        f" retry_after: 200ms{more}}}}}\n"
    )
    try:
        one.start()
        yield one
    finally:
        one.end()


@dataclass
class Model:
    """The container. Its image has the label by which it is woken once it is gone."""

    ctr: Ctr
    id: str
    port: int
    logs: Path

    def begun(self) -> set[int]:
        """Return the requests that it has begun to answer."""
        lines = (self.logs / "begun").read_text().split("\n")
        return {int(line) for line in lines if line.isdecimal()}

    def most(self) -> int:
        """Return how many it has had at one time."""
        lines = (self.logs / "begun").read_text().split("\n")
        return max(int(line.split()[1]) for line in lines if line.startswith("most "))


@contextmanager
def serving(ctr: Ctr, place: Path) -> Iterator[Model]:
    logs, port = place / "logs", free_port()
    logs.mkdir()
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    mount = f"type=bind,src={logs},dst=/log,options=rbind:rw"
    flags = ["--net-host", "--mount", mount, *gpu.mounts(), *visible(0)]
    with own.running("python3", "-c", SERVER, str(port), id=ctr.new_id("model"), flags=flags) as id:
        eventually(lambda: accepts(port), seconds=40)
        yield Model(own, id, port, logs)


def accepts(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def with_image(agent: NodeAgent, model: Model) -> str:
    """Write an image of the model, and label it."""
    name = f"ready-{model.id}"
    agent.done(agent.operation("Checkpoint", wire.CheckpointRequest(name=model.id, path=name, tcp="close")).id)
    eventually(lambda: agent.registered(name) is not None)
    labels = {"kybernate.io/wake": model.id}
    agent.call("Checkpoints", "LabelImage", wire.LabelImageRequest(image=name, labels=labels))
    return name


# ---- load


@dataclass
class Load:
    """Requests that begin evenly. `outcomes` counts them; those in `failed` had no whole answer."""

    urls: list[str]
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    number: int = 0
    done: bool = False

    async def run(self) -> None:
        """Send until `done`, then wait for all answers."""
        tasks, loop = set[asyncio.Task[None]](), asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client:
            start, first = loop.time(), self.number
            while not self.done:
                self.number += 1
                tasks.add(asyncio.create_task(self._one(client, self.number)))
                await asyncio.sleep(max(0.0, start + (self.number - first) / PER_SECOND - loop.time()))
            await asyncio.gather(*tasks)

    async def _one(self, client: aiohttp.ClientSession, number: int) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                outcome = await self._answered(client, number)
        except TimeoutError:
            outcome = "hangs"
        self.outcomes[outcome] += 1
        if outcome != "whole":
            self.failed[number] = outcome

    async def _answered(self, client: aiohttp.ClientSession, number: int) -> str:
        tries = 0
        while True:
            url = self.urls[(number + tries) % len(self.urls)]
            tries += 1
            status = 0
            try:
                async with client.post(
                    f"{url}/v1/chat/completions", json={"model": "tiny", "number": number}
                ) as answer:
                    status = answer.status
                    text = await answer.text()
                    if status == 200:
                        good = f"data: {number * 10}\n\ndata: end\n\n"
                        return "whole" if text == good else f"wrong: {text!r}" if "end" in text else "cut off"
                    if status != 503:
                        return f"{status} {text[:200]}"
            except aiohttp.ClientError:
                if status == 200:
                    return "cut off"
            self.outcomes["repeated"] += 1
            await asyncio.sleep(0.1)


def under_load(urls: list[str], *acts: Callable[[], object]) -> Load:
    """Have the load run while acts take place, one every SECONDS; return when everything was answered."""
    load = Load(urls)

    async def both() -> None:
        running = asyncio.create_task(load.run())
        end = time.monotonic() + LONG
        while True:
            for act in acts:
                await asyncio.sleep(SECONDS / 2)
                await asyncio.to_thread(act)
                await asyncio.sleep(SECONDS / 2)
            if time.monotonic() > end:
                break
        load.done = True
        await running

    asyncio.run(both())
    print(dict(load.outcomes))
    return load


def assert_only_begun_answers_failed(load: Load, model: Model) -> None:
    assert load.outcomes["hangs"] == 0
    assert not [one for one in load.failed.values() if one.startswith("wrong")], load.failed
    assert load.outcomes["whole"] + len(load.failed) == load.number
    assert set(load.failed) <= model.begun(), load.failed


# ---- the matrix


def test_kills_under_load(ctr: Ctr, gpus: Gpus, agent: NodeAgent, place: Path) -> None:
    """With HAProxy. What does not pass a request loses none: the proxy, the agent."""
    with ExitStack() as stack:
        model = stack.enter_context(serving(ctr, place))
        with_image(agent, model)
        own = f"agent: {{address: '{agent.address}'}}"
        proxy = stack.enter_context(proxying(place / "one", model.id, model.port, "haproxy", agent=own))
        eventually(lambda: proxy.state()["state"] == "awake", seconds=40)  # type: ignore[index]

        def kill_proxy() -> None:
            proxy.kill()
            proxy.start()

        def kill_haproxy() -> None:
            for one in proxy.haproxy():
                one.kill()

        def kill_agent() -> None:
            """Its wake is waited for, by requests that come before it is started again."""
            agent.stop(signal.SIGKILL)
            agent.start()
            agent.wait_ready()
            proxy.suspend()

        def kill_daemon() -> None:
            shim_of(model.ctr, model.id).kill()

        def kill_container() -> None:
            os.kill(model.ctr.pid(model.id), signal.SIGKILL)

        for kill, loses in (
            (kill_proxy, False), (kill_agent, False), (kill_haproxy, True), (kill_daemon, True), (kill_container, True)
        ):  # fmt: skip
            load = under_load([proxy.url], kill)
            assert_only_begun_answers_failed(load, model)
            assert loses or not load.failed, (kill.__name__, load.failed)
            assert len(load.failed) < load.number / 4, (kill.__name__, load.outcomes)
            shutil.copy(model.logs / "begun", place / f"begun-{kill.__name__}")


def test_agent_that_is_killed_during_a_wake(ctr: Ctr, gpus: Gpus, agent: NodeAgent, place: Path) -> None:
    own = f"agent: {{address: '{agent.address}'}}"
    with serving(ctr, place) as model, proxying(place / "one", model.id, model.port, "embedded", agent=own) as proxy:
        eventually(lambda: proxy.state()["state"] == "awake", seconds=40)  # type: ignore[index]
        proxy.suspend()
        eventually(lambda: gpus.used() == [0, 0], seconds=40)
        agent.stop(signal.SIGKILL)

        async def asked() -> list[str]:
            load = Load([proxy.url])
            async with aiohttp.ClientSession() as client:
                tasks = [asyncio.create_task(load._answered(client, number)) for number in range(1, 21)]
                await asyncio.to_thread(eventually, lambda: proxy.state()["waiting"] == 20)  # type: ignore[index]
                agent.start()
                return await asyncio.gather(*tasks)

        assert set(asyncio.run(asked())) == {"whole"}


def test_restart_of_the_proxy_keeps_streams_and_ends_what_is_held(
    ctr: Ctr, gpus: Gpus, agent: NodeAgent, place: Path
) -> None:
    own = f"agent: {{address: '{agent.address}'}}"
    with ExitStack() as stack:
        model = stack.enter_context(serving(ctr, place))
        proxy = stack.enter_context(
            proxying(place / "one", model.id, model.port, "haproxy", agent=own, more=", concurrency: 20")
        )
        eventually(lambda: proxy.state()["state"] == "awake", seconds=40)  # type: ignore[index]

        async def stream(client: aiohttp.ClientSession, number: int) -> str:
            asked = {"model": "tiny", "number": number, "steps": 40, "pause": 0.25}
            async with client.post(f"{proxy.url}/v1/chat/completions", json=asked) as answer:
                return await answer.text()

        async def held(client: aiohttp.ClientSession, number: int) -> tuple[int, bool]:
            form = aiohttp.FormData({"model": "tiny"})  # which the activator alone reads
            form.add_field("file", b"x", filename="x")
            async with client.post(f"{proxy.url}/v1/audio/transcriptions", data=form) as answer:
                await answer.read()
                return answer.status, "Retry-After" in answer.headers

        async def restarted() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
                streams = [asyncio.create_task(stream(client, number)) for number in range(1, 21)]
                await asyncio.to_thread(eventually, lambda: len(model.begun()) == 20)
                waiting = [asyncio.create_task(held(client, number)) for number in range(200)]
                await asyncio.to_thread(eventually, lambda: _waiting(proxy) >= 180)
                await asyncio.to_thread(proxy.kill, signal.SIGUSR1)
                await asyncio.to_thread(proxy.start)
                assert {one.rpartition("data: ")[2] for one in await asyncio.gather(*streams)} == {"end\n\n"}
                ends = Counter(await asyncio.gather(*waiting))
                print(ends)
                assert {status for status, _ in ends} <= {503, 502, 200, 500}
                assert ends[503, True] >= 180

        asyncio.run(restarted())


def _waiting(proxy: Proxy) -> int:
    state = proxy.state()
    return 0 if state is None else int(state["waiting"])


def test_two_proxies_share_and_one_is_killed(ctr: Ctr, gpus: Gpus, place: Path) -> None:
    """Over TCP, by their certificates, as on machines without an agent; two planes. One wake, and one concurrency."""
    authority, port = Authority(), free_port()
    authority.write(place, "localhost")
    key, certificate = authority.issue("proxy.nodes.example")
    for name, content in (("proxy.key", key), ("proxy.pem", certificate)):
        (place / name).write_bytes(content)
    tls = "".join(f'{name} = "{place}/{name}"\n' for name in ("certificate", "key", "client_ca"))
    settings = f'[tls]\nlisten = "127.0.0.1:{port}"\n{tls}proxies = ["proxy.nodes.example"]\n'
    remote = (
        f"agent: {{address: 'localhost:{port}', ca: {place}/client_ca, certificate: {place}/proxy.pem,"
        f" key: {place}/proxy.key}}"
    )
    with ExitStack() as stack:
        agent = stack.enter_context(node_agent.running(place, settings))
        model = stack.enter_context(serving(ctr, place))
        one, other = (
            stack.enter_context(
                proxying(place / plane, model.id, model.port, plane, agent=remote, more=", concurrency: 4")
            )
            for plane in ("embedded", "haproxy")
        )
        eventually(lambda: one.state()["state"] == "awake", seconds=40)  # type: ignore[index]
        one.suspend()
        eventually(lambda: gpus.used() == [0, 0], seconds=40)
        load = under_load([one.url, other.url], lambda: None)
        assert load.failed == {}
        assert model.most() <= 4
        found = agent.call("Operations", "ListOperations", wire.ListOperationsRequest()).operations
        assert {one.verb for one in found if one.state == wire.FAILED} == set()
        load = under_load([one.url, other.url], one.kill)
        assert_only_begun_answers_failed(load, model)
        assert load.outcomes["whole"] > PER_SECOND
        assert model.most() <= 4
