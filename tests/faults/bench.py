"""A pretended machine with a helper, an arena and three programs, used for one fault after the other."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from kybernate_shim.address import answers
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.owner import ArenaOwner
from kybernate_shim.cuda_worker import kernel
from kybernate_shim.gpu.errors import CudaUnavailable
from kybernate_shim.gpu.helper_client import CudaHelper
from kybernate_shim.linux.mount.rootfs import unmount_tree
from tests.contract.cuda_driver.helper_processes import kill
from tests.fakes.cuda import GIB, Gpus
from tests.fakes.cuda.programs import Holder
from tests.faults import hasty_helper

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PIECE = 2 * MIB
ARENA_BYTES = 32 * MIB
CONTEXT = 8 * MIB
CAPABILITY = 9, 0  # of a pretended GPU
PIECES = {"a": 3, "b": 2, "c": 1}  # of each program, which are allocations of their own
PATIENCE = 30.0  # s for what is not meant to hang: the machine may be busy


class Tenant(Holder):
    """A program, and what its memory must hold."""

    def __init__(self, name: str, gpus: Gpus, libraries: Path, preload: Path | None) -> None:
        self.name = name
        self._next = 0
        super().__init__(gpus, libraries, PIECES[name], preload, allocations=PIECES[name])
        for piece in range(PIECES[name]):
            self.fill(piece, self._value())
        self.had = self.descriptors()

    @property
    def bytes(self) -> int:
        return PIECES[self.name] * PIECE

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """How it has ended."""
        return self._process.poll()

    def change(self) -> None:
        """Change all pieces but the first, so that a part of what the arena has is as it was."""
        for piece in range(1, PIECES[self.name]):
            self.fill(piece, self._value())

    def answers_right(self, seconds: float = PATIENCE) -> bool:
        """Tell whether the program uses its GPU, and finds there what it has put there."""
        assert self._process.stdout is not None
        self.begin("content")
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return False
        return self._told() == " ".join(map(str, self._content))

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def _value(self) -> int:
        """Return a value that no other program's memory has had: they share the numbers out by their names."""
        self._next += 1
        return 3 * (self._next % 80) + "abc".index(self.name) + 1


class Bench:
    """Everything of one pretended machine. `start` it, and `stop` it."""

    def __init__(self, root: Path, libraries: Path, preload: Path) -> None:
        self.root = root
        self.gpus = Gpus.create(root / "machine", size=GIB)
        self.memory = Memory(ARENA_BYTES, root / "arena")
        self.images = root / "images"
        self.tenants: dict[str, Tenant] = {}
        self.socket = root / "run" / "cuda.sock"
        self.helper = Client(self.socket, self.ensure_helper)
        self._libraries, self._preload = libraries, preload
        self._helper: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._prepare)
        for name in PIECES:
            await self.begin(name)

    async def stop(self) -> None:
        await self.helper.close()
        await asyncio.to_thread(self._end)

    async def begin(self, name: str) -> Tenant:
        """Start a program of this name, in the place of one that has ended."""
        preload = self._preload if name != "c" else None
        tenant = await asyncio.to_thread(Tenant, name, self.gpus, self._libraries, preload)
        self.tenants[name] = tenant
        return tenant

    async def ensure_helper(self) -> None:
        """Start the helper where none lives, as its client would, and wait until it listens."""
        async with asyncio.timeout(PATIENCE):
            while not answers(self.socket):
                if self._helper is None or self._helper.poll() is not None:
                    self._start_helper()
                await asyncio.sleep(0.01)

    def _start_helper(self) -> None:
        arguments = ["--socket", self.socket, "--arena", ARENA_BYTES, "--arena-folder", self.root / "arena"]
        command = [sys.executable, "-m", hasty_helper.__name__, *map(str, arguments)]
        environment = dict(os.environ) | self.gpus.environment(self._libraries)
        with self.log.open("ab") as log:
            self._helper = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.root / "helper.log"

    @property
    def pids(self) -> list[int]:
        return [tenant.pid for tenant in self.tenants.values() if tenant.alive]

    def arenas_worker(self) -> psutil.Process | None:
        """Return the worker process that has the arena, if it lives."""
        for child in self.workers():
            try:
                if "arena" in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                pass
        return None

    def workers(self) -> list[psutil.Process]:
        """Return the workers of the helper, if it lives; none that is starting."""
        found: list[psutil.Process] = []
        for helper in self._helpers():
            with suppress(psutil.NoSuchProcess):
                found += helper.children()
        return found

    def _helpers(self) -> list[psutil.Process]:
        """Return the helpers that serve this bench's socket."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.socket) in (process.info["cmdline"] or []):
                found.append(process)
        return found

    def holders(self) -> list[psutil.Process]:
        """Return the processes that hold a program's threads, or are ready to."""
        folder = f"{self.socket.parent}/holders/"
        commands = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
        return [process for process, words in commands.items() if any(word.startswith(folder) for word in words)]

    def kill_helper(self) -> None:
        """Kill the helper, as the kernel might when memory is short; its workers see that and end."""
        started = self._helper  # by the time that it is dead, a client may have started another one
        kill(self._helpers())
        if started is not None:
            started.kill()
            started.wait()

    def in_arena(self, name: str) -> int:
        """Return the bytes of a program that the arena has, or has room for."""
        try:
            record = self.memory.record(ArenaOwner.of(self.tenants[name].pid))
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return sum(one.size for one in (*record.kept, *record.pending))

    def _prepare(self) -> None:
        self.socket.parent.mkdir(mode=0o700)
        self.memory.prepare()
        kernel.cached(self.memory.file.parent, *CAPABILITY).write_bytes(b"machine code")

    def _end(self) -> None:
        for tenant in self.tenants.values():
            tenant.kill()
        workers = self.workers()
        self.kill_helper()
        kill(workers)
        if self.memory.file.parent.is_mount():
            unmount_tree(self.memory.file.parent)


class Client(CudaHelper):
    """A client that has its bench start the helper."""

    def __init__(self, socket: Path, ensure: Callable[[], Awaitable[None]]) -> None:
        super().__init__(socket, start=False)
        self._ensure = ensure

    async def _connect(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            while True:
                await self._ensure()
                with suppress(CudaUnavailable):  # the helper that was there is just being killed
                    return await super()._connect()
                await asyncio.sleep(0.02)
