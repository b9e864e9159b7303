"""A source of the page's data that a test drives, and the page's server in front of it.

It stands in for a node's agent where a test needs what no small node has: 500 containers, 100 000 events, hostile
names, an agent that goes away at a known moment. `tests/system/test_page.py` has the real agent.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from kybernate.node.failure import Failure
from kybernate.page import program
from kybernate.page.access import Role
from kybernate.page.source import Action, ActionRefused, LogAbsent
from kybernate.page.view import Begin, Change, Container, End, Found, Gpu, Image, Object, Put, Seat, Share, Tier
from kybernate_shim.logs import Log
from tests.gpu.page_record import read

SECONDS = 20.0
GIB = 1 << 30


class Scripted:
    """What a test says has changed. Its methods may be called from any thread."""

    def __init__(self, objects: Iterable[Object] = ()) -> None:
        self._waiting: list[Change] = [Found("gpu-node", (("kybernate", "0.1"),)), Begin(), *map(Put, objects), End()]
        self._wake: Callable[[], object] | None = None
        self.asked: list[tuple[Action, str]] = []
        self.refusal: ActionRefused | None = None
        self.lines: list[str] | None = None
        self.log_failure: Failure | None = None
        self.end_log: Callable[[], object] = lambda: None  # ends the output that is being followed

    def say(self, *changes: Change) -> None:
        """Report changes."""
        self._waiting.extend(changes)
        if self._wake is not None:
            self._wake()

    async def changes(self) -> AsyncIterator[Change]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            while self._waiting:
                yield self._waiting.pop(0)
            await ready.wait()
            ready.clear()

    async def act(self, action: Action, key: str) -> str:
        self.asked.append((action, key))
        if self.refusal is not None:
            raise self.refusal
        return f"{action} of {key} has begun."

    async def log(self, container: Container) -> AsyncIterator[str]:
        if self.log_failure is not None:
            raise self.log_failure
        if self.lines is None:
            raise LogAbsent(f"there is no log of {container.title}")
        for line in self.lines:
            yield line
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self.end_log = lambda: loop.call_soon_threadsafe(ended.set)
        await ended.wait()


class Served:
    """A page that is being served."""

    def __init__(self, url: str, socket: Path) -> None:
        self.url, self.socket = url, socket

    def login(self, role: Role = Role.OPERATOR) -> str:
        """Return a link that begins a session."""
        return program.link(role, 3600, self.socket)

    def answers(self) -> bool:
        """Return whether the page answers requests."""
        try:
            return httpx.get(f"{self.url}/healthz").is_success
        except httpx.TransportError:
            return False


@contextmanager
def served(source: Scripted, directory: Path, *, proxy: str = "", port: int = 0) -> Iterator[Served]:
    """Serve the page by its own program, in a thread, until the block ends."""
    control, port = directory / "page.sock", port or _free_port()
    serving = program.Serving("127.0.0.1", port, proxy=proxy, socket=control, session_key=directory / "page.key")
    loop = asyncio.new_event_loop()
    task = loop.create_task(program.serve(serving, source, Log(lambda line: None, 0, {})))
    thread = threading.Thread(target=_run, args=(loop, task), daemon=True)
    thread.start()
    page = Served(f"http://127.0.0.1:{port}", control)
    end = time.monotonic() + SECONDS
    while not page.answers():
        assert thread.is_alive(), "the page's program has ended"
        assert time.monotonic() < end, f"no page answers on {page.url} after {SECONDS} s"
        time.sleep(0.02)
    try:
        yield page
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(SECONDS)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def recorded(state: Path) -> Scripted:
    """Return a node as a recording has it; see `tests.gpu.page_record`."""
    source = Scripted()
    source.say(*(one.change for one in read(state)))
    return source


def small_node(now: float = 0.0) -> list[Object]:
    """Return a node with two GPUs, two seats, three containers, two images and two tiers. Times are before `now`."""
    now = now or time.time()
    return [
        Gpu("GPU-0", 0, "NVIDIA H100", 80 * GIB, 30 * GIB, (Share("k8s.io/a", 28 * GIB),)),
        Gpu("GPU-1", 1, "NVIDIA H100", 80 * GIB, 0),
        Container("k8s.io/a", "default/llama/server", "registry/llama:1", "running", "attached", gpus=("GPU-0",)),
        Container("k8s.io/b", "default/qwen/server", "registry/qwen:1", "running", "suspended", host_bytes=24 * GIB),
        Container("k8s.io/c", "default/web/nginx", "nginx:1", "running"),
        Seat(
            "g00-s1",
            "large",
            "g00",
            (0,),
            "active",
            now - 60,
            "k8s.io/a",
            "default/llama/server",
            5,
            held=28 * GIB,
            busy=True,
        ),
        Seat(
            "g00-s2",
            "large",
            "g00",
            (0,),
            "suspended",
            now - 60,
            "k8s.io/b",
            "default/qwen/server",
            need=24 * GIB,
            waits=("use",),
            reason="g00-s1 is busy, and has the higher priority",
            before=("g00-s1",),
        ),
        Image("image-1", "llama-1", "default/llama/server", now - 60, 32 * GIB, 24 * GIB, ("disk", "ram")),
        Image("image-2", "qwen-1", "default/qwen/server", now - 600, 25 * GIB, 24 * GIB, ("object",), pinned=True),
        Tier("ram", "/dev/shm/kybernate", 64 * GIB, 32 * GIB, 32 * GIB, 1),
        Tier("disk", "/var/lib/kybernate", 0, 57 * GIB, 0, 2),
    ]
