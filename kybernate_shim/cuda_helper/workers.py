"""The helper's worker processes: started, kept warm, asked, and killed when the driver does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kybernate_shim.linux.locks import lock_open
from kybernate_shim.worker_protocol.client import OnEvent, PendingJob, WorkerClient
from kybernate_shim.worker_protocol.cuda_jobs import ERRORS, PROGRAM, DriverUnusable, Ping, Ready
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import Job
from kybernate_shim.worker_protocol.programs import command

START_SECONDS = 60.0  # cuInit takes long on a machine whose driver does not stay loaded
KEPT_WARM = 2
SPARE_SECONDS = 2.0  # after which a spare is started: until then, the job that needs a worker has the CPUs
GONE_PAUSE = 0.02  # between two looks at whether the workers of a helper before have ended

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Results(Generic[A]):
    """The answers by pid, and why others are missing: `timed_out`, or how the worker was lost."""

    answers: Mapping[int, A]
    failure: str = ""
    timed_out: bool = False


class Worker:
    """One worker process, with any number of jobs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)  # Popen.send_signal would reap it, and asyncio lose its status
        self._client: WorkerClient

    @classmethod
    async def start(cls, *arguments: str, inherited: Sequence[int] = ()) -> Worker:
        """Start a worker and wait until its driver is initialized. Raises WorkerError.

        `arguments` follow the socket's descriptor; `worker` says what they mean. It keeps the descriptors `inherited`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command(PROGRAM, str(theirs.fileno()), *arguments), pass_fds=[theirs.fileno(), *inherited]
            )
        worker = cls(process)
        name = f"the worker process {process.pid}"
        worker._client = WorkerClient(*await asyncio.open_connection(sock=ours), name, ERRORS, worker._epitaph)
        try:
            await worker.do(Ready(), seconds=START_SECONDS)
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError):
                raise WorkerError(f"the CUDA driver did not initialize within {START_SECONDS:g} s") from None
            if isinstance(error, WorkerError):
                raise WorkerError(f"the CUDA driver does not initialize: {error}") from error
            if isinstance(error, DriverUnusable):
                raise WorkerError(str(error)) from error
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and self._client.alive

    @property
    def busy(self) -> bool:
        return any(not isinstance(job, Ping) for job in self._client.jobs)

    async def do(self, job: Job[R], *, seconds: float, on_event: OnEvent = lambda event: None) -> R:
        """Do a job, which continues when this is cancelled. Raises a WorkerError, and TimeoutError."""
        return await self._client.do(job, seconds=seconds, on_event=on_event)

    async def call(self, jobs: Mapping[int, Job[A]], *, seconds: float) -> Results[A]:
        """Do a job for each pid in parallel, and collect answers for `seconds`; the worker is killed after that."""
        calls = {pid: self._client.begin(job) for pid, job in jobs.items()}
        timed_out = False
        try:
            async with asyncio.timeout(seconds):
                for call in calls.values():
                    await call.ended()
        except TimeoutError:
            timed_out = True
            await self.kill()
        except asyncio.CancelledError:
            await self.kill()
            raise
        return Results(*await self._collected(calls), timed_out)

    async def _collected(self, calls: Mapping[int, PendingJob[A]]) -> tuple[Mapping[int, A], str]:
        """Return the answers of calls that have ended, and the first reason why one is missing."""
        answers: dict[int, A] = {}
        failure = ""
        for pid, call in calls.items():
            self._client.forget(call)
            try:
                answers[pid] = await call.result()
            except WorkerError as error:
                failure = failure or str(error)
        return answers, failure

    async def kill(self) -> None:
        """End the worker; one that the kernel holds in the driver is left behind to end when it can."""
        if self._pidfd < 0:
            return
        self._client.close()
        await self._ended()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    async def _epitaph(self) -> str:
        status = await self._ended()
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    async def _ended(self) -> int | None:
        """Kill the process, unless it has ended, and return its status; None where the kernel does not let it end."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        return self._process.returncode


class Lifetime:
    """A locked file that a helper's workers inherit: it is locked for as long as one of them, or the helper, lives."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    async def begin(self) -> None:
        """Return when the workers of a helper before, which was killed, have ended."""
        while not lock_open(self.fd):  # noqa: ASYNC110  # of other processes
            await asyncio.sleep(GONE_PAUSE)


class Workers:
    """The pool. Each job has its own worker, so that killing a worker affects no other job."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._idle: list[Worker] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def acquire(self) -> Worker:
        """Return a worker that is ready, a warm one if there is one. Raises WorkerError."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                self._refill()
                return worker
            await worker.kill()
        worker = await self._start()
        self._refill()
        return worker

    async def release(self, worker: Worker) -> None:
        """Take a worker back after its job; a dead or surplus one is dropped."""
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

    async def _start(self) -> Worker:
        return await Worker.start(inherited=[self._lifetime.fd])

    def _refill(self) -> None:
        """Start a spare a little later when none is left, so that the next job does not wait for cuInit."""
        if not self._idle and not self._starting:
            task = asyncio.create_task(self._start_spare())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_spare(self) -> None:
        await asyncio.sleep(SPARE_SECONDS)
        if len(self._idle) >= KEPT_WARM:
            return
        try:
            await self.release(await self._start())
        except WorkerError:
            pass  # the next caller that needs a worker gets the reason
