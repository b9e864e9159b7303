"""What the stdio tests share: they play both neighbours of the shim against the real kernel.

One is containerd's client at the FIFOs; the other the OCI runtime, which starts programs with the descriptors that it
was given. After each test nothing may be left open.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog

from kybernate_shim.linux.children import Child, Children
from kybernate_shim.logs import Log
from kybernate_shim.task.stdio import Stdio, StdioConfig, open_stdio

T = TypeVar("T")
DEADLINE = 20.0


class Entries:
    """A logger that keeps its entries. Stands for the daemon's log."""

    def __init__(self) -> None:
        self.entries: list[dict[str, object]] = []
        self.log: Log = structlog.wrap_logger(None, processors=[self._keep])

    def _keep(self, _logger: object, _method: str, entry: MutableMapping[str, Any]) -> str:
        self.entries.append(dict(entry))
        raise structlog.DropEvent

    def named(self, event: str) -> list[dict[str, object]]:
        return [entry for entry in self.entries if entry["event"] == event]


class Bench:
    """A directory of FIFOs, the children of a daemon, and what was logged."""

    def __init__(self, directory: Path, children: Children) -> None:
        self.directory = directory
        self.children = children
        self.logged = Entries()
        self.opened: list[Stdio] = []

    def fifo(self, name: str) -> str:
        path = self.directory / name
        os.mkfifo(path)
        return str(path)

    def reader(self, fifo: str) -> int:
        """Attach a client to an output FIFO, without blocking."""
        return os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def writer(self, fifo: str) -> int:
        """Attach a client to an input FIFO. Raises OSError (ENXIO) when no process reads it."""
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(fd, True)
        return fd

    async def open(
        self, stdin: str = "", stdout: str = "", stderr: str = "", *, terminal: bool = False, **options: Any
    ) -> Stdio:
        stdio = await open_stdio(
            StdioConfig(stdin, stdout, stderr, terminal),
            children=self.children,
            container="app",
            namespace="k8s.io",
            log=self.logged.log,
            **{"runtime_dir": self.directory, **options},
        )
        self.opened.append(stdio)
        return stdio

    async def start(self, stdio: Stdio, *argv: str) -> Child:
        """Do what a runtime does: start the process with `stdio.fds`, then return."""
        child = self.children.spawn(argv, fds=stdio.fds)
        await stdio.started()
        return child

    async def shell(self, stdio: Stdio, script: str) -> Child:
        return await self.start(stdio, "/bin/sh", "-c", script)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE:g} s: {what}"
        await asyncio.sleep(0.005)


async def read_to_end(fd: int) -> bytes:
    """Read as a client does, until the last writer has closed, and close."""
    received = bytearray()
    while block := await read_some(fd):
        received += block
    os.close(fd)
    return bytes(received)


async def read_some(fd: int, size: int = 1 << 20) -> bytes:
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return os.read(fd, size)
        except BlockingIOError:
            assert time.monotonic() < deadline, "nothing to read, and no end"
            await asyncio.sleep(0.001)


def would_block(fd: int) -> bool:
    """Tell an open, empty FIFO from one at its end."""
    try:
        return os.read(fd, 1) is None
    except BlockingIOError:
        return True


def descriptors() -> list[str]:
    gc.collect()
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def inheritable() -> set[int]:
    """Return the descriptors that every child of this process gets."""
    listed = (int(name) for name in descriptors())
    return {fd for fd in listed if Path(f"/proc/self/fd/{fd}").exists() and os.get_inheritable(fd)}


@pytest.fixture(name="bench")
def fixture_bench(tmp_path: Path) -> Iterator[Callable[[Callable[[Bench], Awaitable[T]]], T]]:
    """Run a test on an event loop; afterwards everything is closed, and nothing may be left open."""

    def run(work: Callable[[Bench], Awaitable[T]]) -> T:
        async def main() -> T:
            children = Children()
            children.attach(asyncio.get_running_loop())
            loaded = Bench(tmp_path, children)
            before = descriptors()
            try:
                return await asyncio.wait_for(work(loaded), 3 * DEADLINE)
            finally:
                for stdio in loaded.opened:
                    stdio.close()
                    stdio.close()
                after = descriptors()
                assert after == before, "descriptors were left open"

        return asyncio.run(main())

    yield run
    assert not list(tmp_path.glob("pty-*")), "a console socket was left behind"


Run = Callable[[Callable[[Bench], Awaitable[T]]], T]
