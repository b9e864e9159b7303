"""The helper's worker processes: started, kept warm, asked, and killed when the driver does not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

START_SECONDS = 60.0  # cuInit takes long on a machine whose driver does not stay loaded
KEPT_WARM = 2


class DriverUnavailable(Exception):
    """A worker could not get the driver to work; the message says why."""


class WorkerDied(Exception):
    """A worker ended in the middle of a job; the message says how."""


@dataclass(frozen=True)
class Results:
    """What came back of a verb: the answers by pid, and why others are missing: `timed_out`, or how the worker died."""

    answers: dict[int, dict[str, Any]]
    failure: str = ""
    timed_out: bool = False


class Worker:
    """One worker process. One job at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)  # Popen.send_signal would reap, and lose asyncio the exit status
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, *arguments: str) -> Worker:
        """Start a worker and wait until its driver is initialized. Raises DriverUnavailable.

        `arguments` follow the socket's descriptor; `worker` says what they mean.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kybernate_shim.cuda.worker", str(theirs.fileno()), *arguments),
                pass_fds=[theirs.fileno()],
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(START_SECONDS):
                hello = await worker.read()
        except TimeoutError:
            await worker.kill()
            raise DriverUnavailable(f"the CUDA driver did not initialize within {START_SECONDS:g} s") from None
        except WorkerDied as error:
            raise DriverUnavailable(f"the CUDA driver does not initialize: {error}") from error
        except BaseException:
            await worker.kill()
            raise
        if "unusable" in hello:
            await worker.kill()
            raise DriverUnavailable(hello["unusable"])
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    async def ask(self, job: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Do a job that has one answer. Raises WorkerDied, or TimeoutError, after which the worker is dead, too."""
        try:
            async with asyncio.timeout(seconds):
                self.send(job)
                return await self.read()
        except (TimeoutError, asyncio.CancelledError):
            await self.kill()
            raise

    async def call(self, verb: str, pids: Iterable[int], arguments: list[Any], *, seconds: float) -> Results:
        """Call `verb` on every pid at once and collect the answers for `seconds`; the worker is killed after that."""
        waiting = set(pids)
        answers: dict[int, dict[str, Any]] = {}
        try:
            async with asyncio.timeout(seconds):
                self.send({"verb": verb, "pids": sorted(waiting), "arguments": arguments})
                while waiting - answers.keys():
                    answer = await self.read()
                    answers[answer["pid"]] = answer
        except TimeoutError:
            await self.kill()
            return Results(answers, timed_out=True)
        except WorkerDied as error:
            return Results(answers, failure=str(error))
        except asyncio.CancelledError:
            await self.kill()
            raise
        return Results(answers)

    async def kill(self) -> None:
        """End the worker; one that the kernel holds in the driver is left behind to end when it can."""
        if self._pidfd < 0:
            return
        self._writer.close()
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            async with asyncio.timeout(1.0):
                await self._process.wait()
        except TimeoutError:
            pass
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def send(self, job: dict[str, Any]) -> None:
        """Give the worker a job, and take its answers by `read`."""
        self._writer.write(json.dumps(job).encode() + b"\n")

    async def read(self) -> dict[str, Any]:
        """Return the next answer, of whatever job. Raises WorkerDied."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise WorkerDied(await self._epitaph())
        message: dict[str, Any] = json.loads(line)
        return message

    async def _epitaph(self) -> str:
        await self.kill()
        status = self._process.returncode
        if status is not None and status < 0:
            return f"the worker process {self.pid} was killed by {signal.Signals(-status).name}"
        return f"the worker process {self.pid} ended with status {status}"


class Workers:
    """The pool. A job has a worker of its own, so that killing it costs no other job anything."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def take(self) -> Worker:
        """Return a worker that is ready, a warm one if there is one. Raises DriverUnavailable."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                self._refill()
                return worker
            await worker.kill()
        worker = await Worker.start()
        self._refill()
        return worker

    async def give(self, worker: Worker) -> None:
        """Take a worker back after its job; a dead one, or one too many, goes."""
        if worker.alive and len(self._idle) < KEPT_WARM:
            self._idle.append(worker)
        else:
            await worker.kill()

    async def close(self) -> None:
        for task in self._starting:
            task.cancel()
        for worker in self._idle:
            await worker.kill()
        self._idle.clear()

    def _refill(self) -> None:
        """Start a spare in the background when none is left, so that the next job does not wait for cuInit."""
        if not self._idle and not self._starting:
            task = asyncio.create_task(self._start_spare())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_spare(self) -> None:
        try:
            await self.give(await Worker.start())
        except DriverUnavailable:
            pass  # whoever needs a worker next gets the reason
