"""The processes of the proxy's measurements: a model that answers immediately, and a proxy whose wakes are the bench's.

    python -m tests.bench.proxy_parts upstream [PORT]
    python -m tests.bench.proxy_parts proxy embedded PORT
    python -m tests.bench.proxy_parts load CONNECTIONS

Each prints a line of JSON with its port once it listens. A line on stdin lets wakes of the proxy's model finish. Load
asks the port of each line on stdin for some seconds, and prints its requests a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
from typing import cast

import uvloop

from kybernate.proxy import service
from kybernate.proxy.holding import Phase
from kybernate.proxy.program import spare_collector
from kybernate.proxy.settings import parse
from kybernate_shim.logs import Log
from tests.contract.proxy.stand import FakeModels, free_port

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"object": "x"}'
PIECE = bytes(1 << 20)


class Model(asyncio.Protocol):
    """Answers each request when its body is whole; one for /gib gets a GiB. `order` is the `number` of each body."""

    order: list[int] = []  # noqa: RUF012  (one for all connections)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.data, self.writable = cast("asyncio.Transport", transport), b"", asyncio.Event()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            _, _, rest = head.partition(b"content-length:")
            size = int(rest.partition(b"\r\n")[0] or 0)
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4 : end + 4 + size], self.data[end + 4 + size :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post /gib"):
            self.task = asyncio.ensure_future(self.send_gib())
        elif head.startswith(b"get /order"):
            text = json.dumps(self.order).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        else:
            if b'"number"' in body:
                self.order.append(json.loads(body)["number"])
            self.transport.write(ANSWER)

    async def send_gib(self) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
        for _ in range(1024):
            await self.writable.wait()
            self.transport.write(PIECE)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def load(connections: str) -> None:
    from tests.bench.proxy import closed_loop  # which starts this

    say(pid=os.getpid())
    while port := await asyncio.to_thread(sys.stdin.readline):
        say(rate=await closed_loop(int(port), int(connections)))


async def upstream(port: str = "0") -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Model, "127.0.0.1", int(port), backlog=4096, reuse_port=True)
    say(port=server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def proxy(plane: str, port: str, concurrency: str = "0", threads: str = "0") -> None:
    own = free_port()
    state = tempfile.mkdtemp(prefix="proxy-")
    settings = parse(
        f"listen: 127.0.0.1:{own}\nplane: {plane}\nhaproxy: {{state: {state}, threads: {threads}}}\n"
        "limits: {per_client: 0}\n"
        f"models: {{m: {{container: m, upstream: 'http://127.0.0.1:{port}', concurrency: {concurrency}, "
        "queue: {count: 20000, age: 1h}}}\n"
    )
    models = FakeModels({"m": Phase.ASLEEP})
    models.may_wake.clear()
    running = await service.start(settings, models, Log(lambda line: None, 50, {}))
    loop = asyncio.get_running_loop()

    def wake() -> None:
        os.read(0, 100)
        models.may_wake.set()

    loop.add_reader(0, wake)
    say(port=own, pid=running.plane.child.pid if running.plane is not None else os.getpid())
    await running.engine.seen.wait()
    spare_collector()
    await asyncio.Event().wait()  # until it is killed


async def main() -> None:
    await {"upstream": upstream, "proxy": proxy, "load": load}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
