"""A request wakes a real container on a pretended GPU, and an idle one is suspended again, by agent and shim."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu, node_agent
from tests.system.checkpoints import PYTHON
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.toolkit import visible
from tests.system.node_agent import NodeAgent
from tests.system.proxy_process import free_port, proxying, wakes

# Answers requests with three events, each of which needs the GPU: what was written there is read back.
SERVER = """
import ctypes, json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: {result}"
context, memory, word = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64 << 20))
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        number = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["number"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        call("cuCtxSetCurrent", context)
        for step in range(3):
            sent, back = ctypes.c_uint64(number * 10 + step), ctypes.c_uint64()
            place = ctypes.c_uint64(memory.value + 8 * number)
            call("cuMemcpyHtoD_v2", place, ctypes.byref(sent), ctypes.c_size_t(8))
            call("cuMemcpyDtoH_v2", ctypes.byref(back), place, ctypes.c_size_t(8))
            self.wfile.write(b"data: %d\\n\\n" % back.value)
            self.wfile.flush()
        self.close_connection = True
    def log_message(self, *words):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with node_agent.short_place() as directory:
        yield directory


@pytest.fixture
def agent(place: Path) -> Iterator[NodeAgent]:
    with node_agent.running(place) as running:
        yield running


@contextmanager
def serving(ctr: Ctr, port: int) -> Iterator[str]:
    """A container with the program, which answers on the node's own port."""
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    flags = ["--net-host", *gpu.mounts(), *visible(0)]
    with own.running("python3", "-c", SERVER, str(port), id=ctr.new_id("model"), flags=flags) as id:

        def accepts() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        eventually(accepts, seconds=40)
        yield id


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
