"""The service kybernate.cuda.v1.Cuda: each method takes a worker, calls the driver, and reports on each process.

A call that changes a process waits for those that change it already. The node's settings are read with each call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.config import GpuSettings
from kybernate_shim.cuda_helper import workers as pool
from kybernate_shim.cuda_helper.answers import device, outcome_of
from kybernate_shim.cuda_helper.arena_manager import ArenaManager
from kybernate_shim.cuda_helper.covers import Covers
from kybernate_shim.cuda_helper.driver_lock import NOT_RUNNING
from kybernate_shim.cuda_helper.holders import Holders, Uncovered
from kybernate_shim.cuda_helper.log_events import event_of
from kybernate_shim.cuda_helper.moved import Moved, NotMoved
from kybernate_shim.cuda_helper.turns import Turns
from kybernate_shim.linux.kernel_text import plain
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Services
from kybernate_shim.worker_protocol.cuda_jobs import (
    Checkpoint,
    Describe,
    DriverAnswer,
    DriverState,
    Lock,
    ReadState,
    Restore,
    Unlock,
)
from kybernate_shim.worker_protocol.errors import WorkerError
from kybernate_shim.worker_protocol.messages import Job

SERVICE: Final = wire.DESCRIPTOR.services_by_name["Cuda"].full_name
INFO_SECONDS = 60.0
GONE_SECONDS = 10.0  # for the workers of a helper that was killed, which end as soon as they see that
LEFT_SECONDS = 15.0  # for a holder to answer, which may be stopping threads
SETTLE_SECONDS = 120.0  # for a call that was given up, which the driver may carry out all the same
LOCK_GRACE_SECONDS = 2.0  # the driver gives up a lock by itself; after this it is taken to hang
STATES: dict[int, wire.State] = {
    DriverState.RUNNING: wire.RUNNING,
    DriverState.LOCKED: wire.LOCKED,
    DriverState.CHECKPOINTED: wire.CHECKPOINTED,
    DriverState.FAILED: wire.FAILED,
}
NO_CUDA = "CUDA_ERROR_NOT_INITIALIZED"
NO_PROCESS = "CUDA_ERROR_OPERATING_SYSTEM"

A = TypeVar("A", bound=DriverAnswer)


class NodeSettings:
    """The helper's settings: those of the node's file at present, except for what its command line has fixed."""

    def __init__(self, file: LiveConfig, fixed: Mapping[str, Any]) -> None:
        self._file = file
        self._fixed = {key: value for key, value in fixed.items() if value is not None}

    def read(self) -> GpuSettings:
        return replace(self._file.read().gpu, **self._fixed)


class CudaService:
    """The methods of the service and what they share: workers, arena, turns, settings."""

    def __init__(self, workers: pool.Workers, holders: Holders, settings: NodeSettings, arena: Path, log: Any) -> None:
        self._workers = workers
        self._holders = holders
        self._log = log
        self._settings = settings
        now = settings.read()
        self.arena_manager = ArenaManager(arena, now.arena, self._one, holders, log, now.arena_share)
        self._begun: asyncio.Task[None] | None = None
        self._taking_over: asyncio.Task[None] | None = None
        self.running = 0
        self._turns = Turns()
        self._covers = Covers(holders, self._settled, log)
        self._moving: Counter[int] = Counter()  # by pid, what is being offloaded or reloaded
        self.last_call = asyncio.get_running_loop().time()

    def services(self) -> Services:
        """Return the table for the ttrpc server."""
        return {
            SERVICE: {
                "Info": Method(wire.InfoRequest, self._counted(self.info)),
                "States": Method(wire.StatesRequest, self._counted(self.states)),
                "Lock": Method(wire.VerbRequest, self._counted(self._changing(self.lock))),
                "Checkpoint": Method(wire.VerbRequest, self._counted(self._changing(self.checkpoint))),
                "Restore": Method(wire.RestoreRequest, self._counted(self._changing(self.restore))),
                "Unlock": Method(wire.VerbRequest, self._counted(self._changing(self.unlock))),
                "Warm": Method(wire.VerbRequest, self._counted(self.warm)),
                "Expect": Method(wire.ExpectRequest, self._counted(self.expect)),
                "Offload": Method(wire.VerbRequest, self._counted(self._changing(self.offload))),
                "Prefetch": Method(wire.PrefetchRequest, self._counted(self.prefetch)),
                "Reload": Method(wire.VerbRequest, self._counted(self._changing(self.reload))),
            }
        }

    def take_over(self, lifetime: pool.Lifetime) -> None:
        """Begin to bring into order what a helper before this one has left stopped, when its workers are gone."""
        self._begun = asyncio.create_task(lifetime.begin())
        gone = partial(asyncio.wait, [self._begun], timeout=GONE_SECONDS)
        self._taking_over = asyncio.create_task(self._take_over(gone))

    async def _take_over(self, gone: Callable[[], Awaitable[object]]) -> None:
        found = await self._holders.left_behind(LEFT_SECONDS)
        self._covers.take_over([one for one in found if isinstance(one, Uncovered)], gone)
        await self.arena_manager.take_over([one for one in found if not isinstance(one, Uncovered)], gone)

    async def look(self) -> GpuSettings:
        """Return the settings as they are now, which the arena follows."""
        now = self._settings.read()
        await self.arena_manager.configure(now.arena, now.arena_share)
        return now

    async def info(self, request: wire.InfoRequest) -> wire.InfoResponse:
        worker = await self._take()
        try:
            info = await worker.do(Describe(), seconds=INFO_SECONDS)
        except (TimeoutError, WorkerError, asyncio.CancelledError) as error:
            await worker.kill()  # one that hangs answers nothing else either
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RpcError(Code.UNAVAILABLE, f"the CUDA driver cannot be queried: {error}") from error
        finally:
            await self._workers.release(worker)
        return wire.InfoResponse(
            driver_version=info.driver_version,
            api_version=info.api_version,
            devices=map(device, info.gpus),
            missing_calls=info.missing_calls,
        )

    async def states(self, request: wire.StatesRequest) -> wire.StatesResponse:
        seconds = request.timeout_ms / 1000
        moving = set(self._moving)
        results = await self._call({pid: ReadState(pid) for pid in request.pids}, seconds)
        moving |= self._moving.keys() | set(self.arena_manager.stranded) | set(self.arena_manager.held)
        reply = wire.StatesResponse()
        for pid in dict.fromkeys(request.pids):
            answer = results.answers.get(pid)
            if answer and not answer.code:
                state = STATES.get(answer.state, wire.UNKNOWN)
                if pid in moving:  # it came locked and leaves locked, its threads are stopped meanwhile
                    state = wire.LOCKED
                away = self.arena_manager.kept_bytes(pid)
                reply.processes.add(pid=pid, state=state, restore_thread=answer.thread, arena_bytes=away)
            elif not answer or answer.name not in (NO_CUDA, NO_PROCESS):
                reply.unknown.append(outcome_of(pid, results, seconds))
        return reply

    async def lock(self, request: wire.VerbRequest) -> wire.VerbResponse:
        self._holders.prepare(1)  # for the checkpoint that follows
        seconds = request.timeout_ms / 1000 + LOCK_GRACE_SECONDS
        return await self._verb(request.pids, lambda pid: Lock(pid, request.timeout_ms), seconds)

    async def checkpoint(self, request: wire.VerbRequest) -> wire.VerbResponse:
        for pid in request.pids:
            await self.arena_manager.drop(pid)
            with suppress(NotMoved):  # the driver's answer to the checkpoint says the same
                await self.arena_manager.lock_held(pid, request.timeout_ms / 1000)
        with self.arena_manager.leaving(request.pids):
            reply = await self._covered(request)
            for outcome in reply.outcomes:
                await self._copied(outcome, request.timeout_ms / 1000)
        return reply

    async def _covered(self, request: wire.VerbRequest) -> wire.VerbResponse:
        """Have the driver checkpoint processes while their threads are stopped, and cover what it has taken away."""
        async with (
            self._worker() as worker,
            self._covers.checkpointing(request.pids, by_caller=request.threads_stopped) as done,
        ):
            reply = await self._verb(request.pids, Checkpoint, request.timeout_ms / 1000, worker)
            done.update(outcome.pid for outcome in reply.outcomes if not outcome.kind)
        return reply

    async def _settled(self, pid: int) -> None:
        """Return when the driver reports the state of a process: not while it carries out a call that was given up."""
        with suppress(RpcError):
            await self._call({pid: ReadState(pid)}, SETTLE_SECONDS)

    async def _copied(self, outcome: wire.Outcome, seconds: float) -> None:
        """Wait until the arena has what a process has released; the GPU has its memory until then."""
        try:
            await asyncio.shield(self.arena_manager.copied(outcome.pid, seconds))
        except NotMoved as error:
            self._log.warning("arena.copy_failed", pid=outcome.pid, error=str(error))
            if not outcome.kind:
                outcome.kind, outcome.name, outcome.text = wire.Outcome.REFUSED, ArenaRefusal.AWAY, str(error)

    async def restore(self, request: wire.RestoreRequest) -> wire.VerbResponse:
        await self.arena_manager.ready(pid for pid in request.pids if self.arena_manager.kept_bytes(pid))
        pairs = tuple((pair.old_uuid, pair.new_uuid) for pair in request.gpu_pairs)
        reply = await self._verb(request.pids, lambda pid: Restore(pid, pairs), request.timeout_ms / 1000)
        for outcome in reply.outcomes:
            if outcome.kind:
                await self.arena_manager.drop(outcome.pid)
        return reply

    async def unlock(self, request: wire.VerbRequest) -> wire.VerbResponse:
        """Unlock processes. Whatever came before, none of them computes while its memory is in the arena."""
        stranded = self.arena_manager.stranded
        away = [pid for pid in request.pids if pid in stranded or self.arena_manager.kept_bytes(pid)]
        seconds = request.timeout_ms / 1000
        reloaded = await self._move("reload", self.arena_manager.reload, away, seconds) if away else []
        failed = [outcome for outcome in reloaded if outcome.kind]
        rest = [pid for pid in request.pids if pid not in {outcome.pid for outcome in failed}]
        reply = await self._verb(rest, Unlock, seconds)
        for outcome in reply.outcomes:
            await self._let_go(outcome)
        reply.outcomes.extend(failed)
        return reply

    async def _let_go(self, outcome: wire.Outcome) -> None:
        """Let the threads of an unlocked process resume that were stopped in place of the driver's lock."""
        if outcome.pid in self.arena_manager.held:
            if outcome.name == NOT_RUNNING:  # it never was locked
                outcome.kind, outcome.name, outcome.text = wire.Outcome.DONE, "", ""
            if outcome.kind == wire.Outcome.DONE:
                await self.arena_manager.let_go(outcome.pid)

    async def warm(self, request: wire.VerbRequest) -> wire.VerbResponse:
        await self.arena_manager.ready(request.pids)
        outcomes = await self._move("warm", self.arena_manager.warm, request.pids, request.timeout_ms / 1000)
        await self.arena_manager.shut(set(request.pids))
        return wire.VerbResponse(outcomes=outcomes)

    async def expect(self, request: wire.ExpectRequest) -> wire.VerbResponse:
        expect = partial(self.arena_manager.expect, gpus=request.gpu_uuids)
        return wire.VerbResponse(outcomes=await self._move("expect", expect, [request.pid], request.timeout_ms / 1000))

    async def offload(self, request: wire.VerbRequest) -> wire.VerbResponse:
        return wire.VerbResponse(
            outcomes=await self._move("offload", self.arena_manager.offload, request.pids, request.timeout_ms / 1000)
        )

    async def prefetch(self, request: wire.PrefetchRequest) -> wire.VerbResponse:
        prefetch = partial(
            self.arena_manager.prefetch,
            gpu=request.gpu_uuid,
            free=request.free_bytes,
            room_comes=request.room_comes,
        )
        seconds = request.timeout_ms / 1000
        return wire.VerbResponse(outcomes=await self._move("prefetch", prefetch, [request.pid], seconds))

    async def reload(self, request: wire.VerbRequest) -> wire.VerbResponse:
        reload = partial(self.arena_manager.reload, coming=(request.room_gpu_uuid, request.room_ms / 1000))
        return wire.VerbResponse(outcomes=await self._move("reload", reload, request.pids, request.timeout_ms / 1000))

    def _counted(self, method: Callable[[Any], Any]) -> Callable[[Any, Call], Any]:
        """Count the calls of `method` for the idle clock, and refuse those without a timeout."""

        async def handle(request: Any, call: Call) -> Any:
            if not isinstance(request, wire.InfoRequest) and not request.timeout_ms:
                raise RpcError(Code.INVALID_ARGUMENT, f"{call.method} needs a timeout")
            self.running += 1
            try:
                await self.look()
                await self._in_order(request)
                return await method(request)
            finally:
                self.running -= 1
                self.last_call = asyncio.get_running_loop().time()

        return handle

    def _changing(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Have a call wait for those that change the same processes, such as one of a shim that was killed."""

        async def handle(request: Any) -> Any:
            async with self._turns.at(request.pids):
                if self._begun is not None:  # first, what an earlier helper left must be covered
                    await asyncio.wait([self._begun], timeout=GONE_SECONDS)
                await self._covers.over(request.pids)
                return await method(request)

        return handle

    async def _in_order(self, request: Any) -> None:
        """Wait for those processes of the call that an earlier helper has left stopped."""
        pids = getattr(request, "pids", None) or [getattr(request, "pid", 0)]
        if self._taking_over is not None and not isinstance(request, wire.InfoRequest):
            await asyncio.wait([self._taking_over])
            await self.arena_manager.taken_over(pids)

    async def _verb(
        self,
        pids: Sequence[int],
        verb: Callable[[int], Job[DriverAnswer]],
        seconds: float,
        worker: pool.Worker | None = None,
    ) -> wire.VerbResponse:
        jobs = {pid: verb(pid) for pid in pids}
        results = await (self._call(jobs, seconds) if worker is None else worker.call(jobs, seconds=seconds))
        outcomes = [outcome_of(pid, results, seconds) for pid in jobs]
        for outcome in outcomes:
            error = {"error": outcome.text, "kind": wire.Outcome.Kind.Name(outcome.kind)} if outcome.kind else {}
            event = event_of("cuda", jobs[outcome.pid].verb)
            self._log.info(event, pid=outcome.pid, seconds=round(outcome.seconds, 3), **error)
        return wire.VerbResponse(outcomes=outcomes)

    async def _move(
        self, verb: str, move: Callable[[int, float], Awaitable[Moved]], pids: Iterable[int], seconds: float
    ) -> list[wire.Outcome]:
        """Do a step of the arena to all processes concurrently, and to its end, even when the client is gone."""
        loop = asyncio.get_running_loop()

        async def one(pid: int) -> wire.Outcome:
            began = loop.time()
            try:
                with self._locked_meanwhile(pid) if verb in ("offload", "reload") else nullcontext():
                    moved = await move(pid, seconds)
            except NotMoved as error:
                self._log.warning(f"arena.{verb}_failed", pid=pid, error=str(error), away=error.away)
                name = ArenaRefusal.AWAY if error.away else ArenaRefusal.FAILED
                return wire.Outcome(pid=pid, kind=wire.Outcome.REFUSED, name=name, text=plain(str(error)))
            took = loop.time() - began
            return wire.Outcome(
                pid=pid, bytes=moved.bytes, spared_bytes=moved.spared, text=plain(moved.reason), seconds=took
            )

        return await asyncio.shield(asyncio.gather(*(one(pid) for pid in dict.fromkeys(pids))))

    @property
    def busy(self) -> bool:
        """Whether the helper has to stay: a call runs, or threads are stopped."""
        return bool(self.running or self.arena_manager.stranded or self.arena_manager.held or self._covers.busy)

    @contextmanager
    def _locked_meanwhile(self, pid: int) -> Iterator[None]:
        self._moving[pid] += 1
        try:
            yield
        finally:
            self._moving -= Counter([pid])  # this removes entries at 0

    async def _one(self, job: Job[A], pid: int, seconds: float) -> A:
        """Call a verb of the driver on one process for the arena, and return the answer. Raises NotMoved."""
        try:
            results = await self._call({pid: job}, seconds + LOCK_GRACE_SECONDS)
        except RpcError as error:
            raise NotMoved(f"{job.verb} of process {pid}: {error.message}") from error
        outcome = outcome_of(pid, results, seconds)
        if outcome.kind:
            why = f"{outcome.name} {outcome.text}".strip()
            raise NotMoved(f"{job.verb} of process {pid}: {why}", name=outcome.name)
        return results.answers[pid]

    async def _call(self, jobs: Mapping[int, Job[A]], seconds: float) -> pool.Results[A]:
        async with self._worker() as worker:
            return await worker.call(jobs, seconds=seconds)

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[pool.Worker]:
        worker = await self._take()
        try:
            yield worker
        finally:
            await self._workers.release(worker)

    async def _take(self) -> pool.Worker:
        try:
            return await self._workers.acquire()
        except WorkerError as error:
            raise RpcError(Code.UNAVAILABLE, str(error)) from error
