"""How soon a model that sleeps answers through the proxy, on a pretended GPU.

`proxy.wake.added` is what the first byte of an answer takes beyond the resume that the shim has measured. `proxy.wake`
is the whole time, against the same program when it is started for the request, as those do that know no suspend: its
process loads its weights from the page cache, its port is tried every 2 ms, and then it gets the request.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from tests.bench.figures import Pair
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.serving import SERVER, serving
from tests.system.node_agent import NodeAgent, running, short_place
from tests.system.proxy_process import free_port, proxying

PLANES = ("embedded", "haproxy")
NAMES = tuple(f"proxy.wake{what}.{plane}" for plane in PLANES for what in (".added", ""))
WAKES = 20
MOST_MS = 30.0
MIB = 256


@dataclass
class Node:
    """An agent, a proxy, and a model that sleeps as soon as nothing asks for it."""

    gpus: Gpus
    agent: NodeAgent
    weights: Path
    port: int  # of the proxy

    def wake(self) -> float:
        """Return the seconds until the first byte of an answer, from sleep."""
        eventually(lambda: self.gpus.used() == [0, 0], seconds=60)
        return first_byte(self.port)

    def added(self) -> float:
        """Return the milliseconds of a wake that are not the resume's own."""
        found = []
        for _ in range(WAKES):
            before = len(self.agent.lines("container.resumed"))
            took = self.wake()
            eventually(lambda before=before: len(self.agent.lines("container.resumed")) > before)  # type: ignore[misc]
            found.append(took - float(self.agent.lines("container.resumed")[-1]["field_seconds"]))
        return median(found) * 1000

    def start(self) -> float:
        """Return the seconds until the first byte of an answer, by the start of a process."""
        eventually(lambda: self.gpus.used() == [0, 0], seconds=60)
        port, began = free_port(), time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", SERVER, "127.0.0.1", str(port), str(self.weights)])
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.002)
            first_byte(port)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def first_byte(port: int) -> float:
    """Return the seconds from a request to the first byte of its answer."""
    body = json.dumps({"model": "m", "number": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = connection.recv(1 << 16)
        took = time.perf_counter() - began
        assert answer.startswith(b"HTTP/1.1 200"), answer
        while not answer.endswith(b"0\r\n\r\n"):
            answer += connection.recv(1 << 16)
    return took


def pairs() -> Iterator[Pair]:
    for plane in PLANES:
        with ExitStack() as stack:
            node = _node(stack, plane)
            yield Pair(f"proxy.wake.added.{plane}", node.added, partial(float, MOST_MS), 1.0, "ms", within=WAKES)
            yield Pair(f"proxy.wake.{plane}", node.wake, node.start, None)


def _node(stack: ExitStack, plane: str) -> Node:
    gpus = gpu.install_driver()
    stack.callback(gpu.remove_driver)
    place = stack.enter_context(short_place())
    weights = place / "weights"
    weights.write_bytes(bytes(range(256)) * (MIB << 12))
    agent = stack.enter_context(running(place))
    port, mount = free_port(), ["--mount", f"type=bind,src={weights},dst=/weights,options=rbind:ro"]
    container = stack.enter_context(serving(Ctr(), port, flags=mount, weights=["/weights"]))
    model = f"container: {container}, upstream: 'http://127.0.0.1:{port}', idle: 100ms"
    url = stack.enter_context(proxying(place, agent, f"plane: {plane}\nmodels: {{m: {{{model}}}}}\n"))
    return Node(gpus, agent, weights, int(url.rpartition(":")[2]))
