"""The proxy against direct connections and a plain HAProxy: latency, requests a second, a GiB, and what is held.

    python -m tests.bench.proxy [latency] [rate] [gib] [held] [--threads 1] [--loaders 6]

Ways that are compared take turns, in one run; a figure is a median of rounds. Load comes from this process, the model
is one of its own (tests/bench/proxy_parts.py). The plain HAProxy routes by the same field of the body, by the same
program and number of threads, which are as many as the machine has CPUs. On a machine with many CPUs, load and model
are slower than that: `--loaders` makes so many processes of each, for requests a second, and `--threads` is HAProxy's
number. A line of JSON per figure is appended to build/bench.jsonl; `stock` is the bar itself
where that is no ratio. Exit status 1 where one misses its bar.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

import uvloop

from kybernate.proxy.haproxy.child import find_binary
from tests.bench.figures import HEADING, Figure, record, row
from tests.contract.proxy.stand import free_port

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1500}]}).encode()
ROUNDS = 7
CONNECTIONS, PER_SECOND, SECONDS = 64, 300, 3.0
HELD = 10_000
FIGURES = ["latency", "rate", "gib", "held"]
PLAIN = """
global
    maxconn 4000
{threads}    stats socket {state}/admin.sock
    tune.bufsize 32768
defaults
    mode http
    timeout connect 5s
    timeout client 1m
    timeout server 1m
    timeout http-request 15s
frontend public
    bind 127.0.0.1:{own}
    http-request wait-for-body time 10s if {{ method POST }}
    http-request set-var(txn.model) req.body,json_query('$.model') if {{ method POST }}
    use_backend %[var(txn.model),map({state}/models.map)] if {{ var(txn.model) -m found }}
    default_backend model
backend model
    server model 127.0.0.1:{port}
"""


def request(body: bytes = BODY, *, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# ---- processes


@contextmanager
def part(*words: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    argv = [sys.executable, "-m", "tests.bench.proxy_parts", *words]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    try:
        yield said, process
    finally:
        process.kill()
        process.wait()
        if said.get("pid", process.pid) != process.pid:
            subprocess.run(["kill", "-9", str(said["pid"])], check=False)


@contextmanager
def upstreams(count: int) -> Iterator[int]:
    """Models that share one port, which is yielded."""
    with ExitStack() as stack:
        port = stack.enter_context(part("upstream"))[0]["port"]
        for _ in range(count - 1):
            stack.enter_context(part("upstream", str(port)))
        yield port


@contextmanager
def awake(plane: str, port: int, threads: int) -> Iterator[int]:
    """A proxy whose model is awake, and whose requests pass as they will from then on."""
    with part("proxy", plane, str(port), "0", str(threads)) as (said, process):
        assert process.stdin is not None
        process.stdin.write(b"wake\n")
        process.stdin.flush()
        while b"wake-ms" in ask(said["port"], request()).lower():
            time.sleep(0.05)
        time.sleep(0.5 if plane == "haproxy" else 0)
        yield said["port"]


@contextmanager
def plain(port: int, threads: int) -> Iterator[int]:
    state, own = Path(tempfile.mkdtemp(prefix="plain-")), free_port()
    (state / "models.map").write_text("m model\n")
    number = f"    nbthread {threads}\n" if threads else ""
    (state / "haproxy.cfg").write_text(PLAIN.format(own=own, port=port, state=state, threads=number))
    process = subprocess.Popen(  # in a session of its own, as ours: the kernel shares CPUs among sessions
        [find_binary(), "-db", "-f", state / "haproxy.cfg"], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while True:
            try:
                ask(own, request())
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield own
    finally:
        process.kill()
        process.wait()


def ask(port: int, content: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(content)
        return connection.recv(1 << 16)


# ---- load


class Client(asyncio.Protocol):
    """A connection that sends one request at a time; `done` has the answer's bytes."""

    def __init__(self) -> None:
        self.data, self.done = b"", asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.endswith(b"}") and not self.done.done():
            self.done.set_result(self.data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionResetError())

    async def ask(self, content: bytes) -> bytes:
        self.data, self.done = b"", asyncio.get_running_loop().create_future()
        self.transport.write(content)
        return bytes(await self.done)


async def clients(port: int, count: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]


async def paced(port: int) -> list[float]:
    """Return the milliseconds of requests that begin evenly, at PER_SECOND over all connections."""
    content, found = request(), list[float]()
    everyone = await clients(port, CONNECTIONS)
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(client: Client, index: int) -> None:
        for number in range(index, int(PER_SECOND * SECONDS), CONNECTIONS):
            await asyncio.sleep(max(0.0, start + number / PER_SECOND - loop.time()))
            began = time.perf_counter()
            await client.ask(content)
            found.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(one(client, index) for index, client in enumerate(everyone)))
    for client in everyone:
        client.transport.close()
    return found


def requests_a_second(port: int, loaders: Sequence[subprocess.Popen[bytes]]) -> float:
    """Return those of CONNECTIONS connections, which are of these processes, or of this one where there are none."""
    if not loaders:
        return float(loop_of(lambda: closed_loop(port, CONNECTIONS)))
    for process in loaders:
        assert process.stdin is not None
        process.stdin.write(b"%d\n" % port)
        process.stdin.flush()
    return sum(float(json.loads(process.stdout.readline())["rate"]) for process in loaders if process.stdout)


async def closed_loop(port: int, connections: int) -> float:
    """Return requests a second of connections, each of which asks again as soon as it has its answer."""
    everyone = await clients(port, connections)
    content, end, count = request(), time.perf_counter() + SECONDS, 0

    async def one(client: Client) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await client.ask(content)
            count += 1

    await asyncio.gather(*(one(client) for client in everyone))
    for client in everyone:
        client.transport.close()
    return count / SECONDS


def gib(port: int) -> float:
    """Return the seconds in which a GiB arrives."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request(path="/gib", more="Connection: close\r\n"))
        buffer, size, began = bytearray(1 << 20), 0, time.perf_counter()
        while size < 1 << 30 and (got := connection.recv_into(buffer)):
            size += got
        assert size >= 1 << 30, size
        return time.perf_counter() - began


def loop_of(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def rounds(ways: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Run all ways ROUNDS times, the first one another each time, after one round that is not counted."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(-1, ROUNDS):
        names = list(ways)
        for name in names if number % 2 else reversed(names):
            value = ways[name]()
            if number >= 0:
                found[name].append(value)
    return found


# ---- figures


def latency(ports: dict[str, int]) -> Iterator[Figure]:
    found = rounds({name: lambda port=port: loop_of(lambda: paced(port)) for name, port in ports.items()})
    p50 = {name: [median(one) for one in all] for name, all in found.items()}
    p99 = {name: [quantiles(one, n=100)[98] for one in all] for name, all in found.items()}
    for name, values, bar in (("p50", p50, 0.8), ("p99", p99, 5.0)):
        added = median(ours - direct for ours, direct in zip(values["embedded"], values["direct"], strict=True))
        yield Figure(f"proxy.embedded.added.{name}", "machine", added, bar, "ms", 1.0, ROUNDS)
        ratio = median(ours / plain for ours, plain in zip(values["haproxy"], values["plain"], strict=True))
        ours, plain_ms = median(values["haproxy"]), median(values["plain"])
        yield Figure(f"proxy.haproxy.latency.{name}", "machine", ours, plain_ms, "ms", 1.1, ROUNDS, ratio)


def rate(ports: dict[str, int], loaders: Sequence[subprocess.Popen[bytes]]) -> Iterator[Figure]:
    found = rounds({name: lambda port=port: requests_a_second(port, loaders) for name, port in ports.items()})
    ratio = median(plain / ours for ours, plain in zip(found["haproxy"], found["plain"], strict=True))
    ours, plain_rate = median(found["haproxy"]), median(found["plain"])
    yield Figure("proxy.haproxy.rate", "machine", ours, plain_rate, "1/s", 1 / 0.9, ROUNDS, ratio)
    yield Figure(
        "proxy.embedded.rate", "machine", median(found["embedded"]), median(found["direct"]), "1/s", None, ROUNDS
    )


def streaming(ports: dict[str, int]) -> Iterator[Figure]:
    found = rounds({name: lambda port=port: gib(port) for name, port in ports.items() if name != "direct"})
    for name, share in (("embedded", 0.5), ("haproxy", 0.95)):
        ratio = median(ours / plain for ours, plain in zip(found[name], found["plain"], strict=True))
        ours, plain_seconds = median(found[name]), median(found["plain"])
        yield Figure(f"proxy.{name}.gib", "machine", ours, plain_seconds, "s", 1 / share, ROUNDS, ratio)


def memory_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("Pss:")[2].split()[0]) << 10


def held(port: int) -> Iterator[Figure]:
    """Hold many requests, each on a connection of its own; then wake, and look at their order."""

    async def hold(own: int, pid: int, wake: Callable[[], None]) -> float:
        before = memory_of(pid)
        everyone, answers = list[Client](), []
        for number in range(HELD):
            client = (await clients(own, 1))[0]
            everyone.append(client)
            body = json.dumps({"model": "m", "number": number, "text": "x" * 1500}).encode()
            answers.append(asyncio.ensure_future(client.ask(request(body))))
            if number % 20 == 19:
                await asyncio.sleep(0)
        await asyncio.sleep(3)
        each = (memory_of(pid) - before) / HELD
        wake()
        lost = sum(not isinstance(one, bytes) for one in await asyncio.gather(*answers, return_exceptions=True))
        assert lost == 0, f"{lost} requests were lost"
        return each / 1024

    with part("proxy", "embedded", str(port), "32") as (said, process):
        assert process.stdin is not None
        stdin = process.stdin

        def wake() -> None:
            stdin.write(b"wake\n")
            stdin.flush()

        kib = loop_of(lambda: hold(said["port"], process.pid, wake))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /order HTTP/1.1\r\nHost: h\r\n\r\n")
        text = b""
        while not text.endswith(b"]"):
            text += connection.recv(1 << 20)
    order = json.loads(text.partition(b"\r\n\r\n")[2])
    assert sorted(order) == list(range(HELD))
    # Up to 32 are at the model at one time, on connections of their own, so that neighbours may change places there.
    assert all(abs(place - number) < 64 for place, number in enumerate(order)), "released in another order"
    yield Figure("proxy.held.kib", "machine", kib, 40.0, "KiB", 1.0, HELD)


def main() -> int:
    """Return 1 where a figure misses its bar."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    arguments = _arguments()
    threads, loaders = arguments.threads, arguments.loaders
    each = str(CONNECTIONS // max(1, loaders))
    figures: list[Figure] = []
    print(HEADING, flush=True)
    with ExitStack() as stack:
        if set(arguments.figures) - {"held"}:
            direct = stack.enter_context(upstreams(max(1, loaders)))
            ports = {"direct": direct, "plain": stack.enter_context(plain(direct, threads))}
            ports |= {plane: stack.enter_context(awake(plane, direct, threads)) for plane in ("embedded", "haproxy")}
        made: dict[str, Callable[[], Iterator[Figure]]] = {
            "latency": lambda: latency(ports),
            "rate": lambda: rate(ports, [stack.enter_context(part("load", each))[1] for _ in range(loaders)]),
            "gib": lambda: streaming(ports),
            "held": lambda: held(stack.enter_context(upstreams(1))),
        }
        for name in arguments.figures:
            for figure in made[name]():
                figures.append(figure)
                print(row(figure), flush=True)
                record([figure])
    return 0 if all(figure.good for figure in figures) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.proxy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", nargs="*", default=FIGURES, metavar="|".join(FIGURES), help="all without any")
    parser.add_argument("--threads", type=int, default=0, help="of HAProxy, ours and the plain one (one for each CPU)")
    parser.add_argument("--loaders", type=int, default=0, help="processes that ask and that answer, for `rate`")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
