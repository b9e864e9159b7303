"""The CUDA helper: one process per node that does the driver's checkpoint calls for every shim.

`python -m kybernate_shim.cuda.helper --socket PATH`. It serves kybernate.cuda.v1.Cuda on a socket that only its own
user may use, keeps libcuda out of itself (see `workers`), and ends when nobody has called for `gpu.helper_idle`
seconds: its workers hold the driver, which could not be updated while they live. A second helper on the same socket
ends at once, with success. The node's arena is its, too, and outlives it.

The node's settings are looked at with each call, and every few seconds while it waits; what is given on the command
line stays.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import structlog

from kybernate_shim.config import DEFAULT_PATH, Gpu
from kybernate_shim.cuda import pages
from kybernate_shim.cuda import workers as pool
from kybernate_shim.cuda.arena.banks import from_text
from kybernate_shim.cuda.arena.keeper import Keeper, Moved, NotMoved
from kybernate_shim.cuda.arena.memory import FOLDER
from kybernate_shim.cuda.pool_keeper import PoolKeeper
from kybernate_shim.linux.private import NO_OTHERS, make_directory
from kybernate_shim.live_config import LiveConfig
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Server, Services

SERVICE = "kybernate.cuda.v1.Cuda"
LOOK_SECONDS = 5.0
INFO_SECONDS = 60.0
LOCK_GRACE_SECONDS = 2.0  # the driver gives up a lock by itself; after this it is taken to hang
# The driver's states in the order of its numbers. Source: CUDA Driver API, CUprocessState.
STATES = (wire.RUNNING, wire.LOCKED, wire.CHECKPOINTED, wire.FAILED)
NO_CUDA = "CUDA_ERROR_NOT_INITIALIZED"
NO_PROCESS = "CUDA_ERROR_OPERATING_SYSTEM"


class NodeSettings:
    """What the helper does as the node's file says now, but for what its command line has fixed."""

    def __init__(self, file: LiveConfig, fixed: Mapping[str, Any]) -> None:
        self._file = file
        self._fixed = {key: value for key, value in fixed.items() if value is not None}

    def read(self) -> Gpu:
        return replace(self._file.read().gpu, **self._fixed)


class Helper:
    """Answers the service. Every method takes a worker, calls the driver, and tells what became of each process."""

    def __init__(self, workers: pool.Workers, settings: NodeSettings, arena: Path, log: Any) -> None:
        self._workers = workers
        self._log = log
        self._settings = settings
        now = settings.read()
        self.keeper = Keeper(arena, now.arena, self._one, log, now.arena_share)
        self.running = 0
        self.last_call = asyncio.get_running_loop().time()

    def services(self) -> Services:
        """Return the table for the ttrpc server."""
        return {
            SERVICE: {
                "Info": Method(wire.InfoRequest, self._counted(self.info)),
                "States": Method(wire.StatesRequest, self._counted(self.states)),
                "Lock": Method(wire.VerbRequest, self._counted(self.lock)),
                "Checkpoint": Method(wire.VerbRequest, self._counted(self.checkpoint)),
                "Restore": Method(wire.RestoreRequest, self._counted(self.restore)),
                "Unlock": Method(wire.VerbRequest, self._counted(self.unlock)),
                "Warm": Method(wire.VerbRequest, self._counted(self.warm)),
                "Expect": Method(wire.ExpectRequest, self._counted(self.expect)),
                "Take": Method(wire.VerbRequest, self._counted(self.take)),
                "Prefetch": Method(wire.PrefetchRequest, self._counted(self.prefetch)),
                "Give": Method(wire.VerbRequest, self._counted(self.give)),
            }
        }

    async def look(self) -> Gpu:
        """Return the settings as they are now, which the arena follows."""
        now = self._settings.read()
        await self.keeper.configure(now.arena, now.arena_share)
        return now

    async def info(self, request: wire.InfoRequest) -> wire.InfoResponse:
        worker = await self._take()
        try:
            answer = await worker.ask({"verb": "info"}, seconds=INFO_SECONDS)
        except (TimeoutError, pool.WorkerDied) as error:
            raise RpcError(Code.UNAVAILABLE, f"the CUDA driver does not describe itself: {error}") from error
        finally:
            await self._workers.give(worker)
        devices = [wire.Device(**device) for device in answer.pop("devices")]
        return wire.InfoResponse(devices=devices, **answer)

    async def states(self, request: wire.StatesRequest) -> wire.StatesResponse:
        seconds = request.timeout_ms / 1000
        results = await self._call("state", request.pids, [], seconds)
        reply = wire.StatesResponse()
        for pid in dict.fromkeys(request.pids):
            answer = results.answers.get(pid)
            if answer and not answer["code"]:
                state = STATES[answer["state"]] if answer["state"] < len(STATES) else wire.UNKNOWN
                if pid in self.keeper.stranded:  # as good as that: it is until it can be
                    state = wire.LOCKED
                away = self.keeper.kept_bytes(pid)
                reply.processes.add(pid=pid, state=state, restore_thread=answer["thread"], arena_bytes=away)
            elif not answer or answer["name"] not in (NO_CUDA, NO_PROCESS):
                reply.unknown.append(_outcome(pid, results, seconds))
        return reply

    async def lock(self, request: wire.VerbRequest) -> wire.VerbResponse:
        seconds = request.timeout_ms / 1000 + LOCK_GRACE_SECONDS
        return await self._verb("lock", request.pids, [request.timeout_ms], seconds)

    async def checkpoint(self, request: wire.VerbRequest) -> wire.VerbResponse:
        for pid in request.pids:
            await self.keeper.drop(pid)
        with self.keeper.leaving(request.pids):
            return await self._verb("checkpoint", request.pids, [], request.timeout_ms / 1000)

    async def restore(self, request: wire.RestoreRequest) -> wire.VerbResponse:
        pairs = [[pair.old_uuid, pair.new_uuid] for pair in request.gpu_pairs]
        reply = await self._verb("restore", request.pids, [pairs], request.timeout_ms / 1000)
        for outcome in reply.outcomes:
            if outcome.kind:
                await self.keeper.drop(outcome.pid)
        return reply

    async def unlock(self, request: wire.VerbRequest) -> wire.VerbResponse:
        """Whoever asks, and whatever went before: a process whose memory is in the arena must not compute."""
        away = [pid for pid in request.pids if self.keeper.kept_bytes(pid)]
        given = await self._move("give", self.keeper.give, away, request.timeout_ms / 1000) if away else []
        failed = [outcome for outcome in given if outcome.kind]
        rest = [pid for pid in request.pids if pid not in {outcome.pid for outcome in failed}]
        reply = await self._verb("unlock", rest, [], request.timeout_ms / 1000)
        reply.outcomes.extend(failed)
        return reply

    async def warm(self, request: wire.VerbRequest) -> wire.VerbResponse:
        outcomes = await self._move("warm", self.keeper.warm, request.pids, request.timeout_ms / 1000)
        await self.keeper.shut(set(request.pids))
        return wire.VerbResponse(outcomes=outcomes)

    async def expect(self, request: wire.ExpectRequest) -> wire.VerbResponse:
        expect = partial(self.keeper.expect, gpus=request.gpu_uuids)
        return wire.VerbResponse(outcomes=await self._move("expect", expect, [request.pid], request.timeout_ms / 1000))

    async def take(self, request: wire.VerbRequest) -> wire.VerbResponse:
        return wire.VerbResponse(
            outcomes=await self._move("take", self.keeper.take, request.pids, request.timeout_ms / 1000)
        )

    async def prefetch(self, request: wire.PrefetchRequest) -> wire.VerbResponse:
        prefetch = partial(self.keeper.prefetch, gpu=request.gpu_uuid, free=request.free_bytes)
        seconds = request.timeout_ms / 1000
        return wire.VerbResponse(outcomes=await self._move("prefetch", prefetch, [request.pid], seconds))

    async def give(self, request: wire.VerbRequest) -> wire.VerbResponse:
        return wire.VerbResponse(
            outcomes=await self._move("give", self.keeper.give, request.pids, request.timeout_ms / 1000)
        )

    def _counted(self, method: Callable[[Any], Any]) -> Callable[[Any, Call], Any]:
        """Let the idle clock see the calls of `method`, and refuse those that would have no end."""

        async def handle(request: Any, call: Call) -> Any:
            if not isinstance(request, wire.InfoRequest) and not request.timeout_ms:
                raise RpcError(Code.INVALID_ARGUMENT, f"{call.method} without a time-out could wait for ever")
            self.running += 1
            try:
                await self.look()
                return await method(request)
            finally:
                self.running -= 1
                self.last_call = asyncio.get_running_loop().time()

        return handle

    async def _verb(self, verb: str, pids: Sequence[int], arguments: list[Any], seconds: float) -> wire.VerbResponse:
        results = await self._call(verb, pids, arguments, seconds)
        outcomes = [_outcome(pid, results, seconds) for pid in dict.fromkeys(pids)]
        for outcome in outcomes:
            error = {"error": outcome.text, "kind": wire.Outcome.Kind.Name(outcome.kind)} if outcome.kind else {}
            self._log.info(f"cuda.{verb}", pid=outcome.pid, seconds=round(outcome.seconds, 3), **error)
        return wire.VerbResponse(outcomes=outcomes)

    async def _move(
        self, verb: str, move: Callable[[int, float], Awaitable[Moved]], pids: Iterable[int], seconds: float
    ) -> list[wire.Outcome]:
        """Do a step of the arena to all processes at once, and to its end, also when whoever asked is gone."""
        loop = asyncio.get_running_loop()

        async def one(pid: int) -> wire.Outcome:
            began = loop.time()
            try:
                moved = await move(pid, seconds)
            except NotMoved as error:
                self._log.warning(f"arena.{verb}_failed", pid=pid, error=str(error), away=error.away)
                name = "ARENA_AWAY" if error.away else "ARENA_FAILED"
                return wire.Outcome(pid=pid, kind=wire.Outcome.REFUSED, name=name, text=str(error))
            took = loop.time() - began
            return wire.Outcome(pid=pid, bytes=moved.bytes, spared_bytes=moved.spared, text=moved.reason, seconds=took)

        return await asyncio.shield(asyncio.gather(*(one(pid) for pid in dict.fromkeys(pids))))

    async def _one(self, verb: str, pid: int, seconds: float) -> None:
        """Call a verb of the driver on one process for the arena. Raises NotMoved."""
        arguments = [_milliseconds(seconds)] if verb == "lock" else []
        try:
            results = await self._call(verb, [pid], arguments, seconds + LOCK_GRACE_SECONDS)
        except RpcError as error:
            raise NotMoved(f"{verb} of process {pid}: {error.message}") from error
        outcome = _outcome(pid, results, seconds)
        if outcome.kind:
            why = f"{outcome.name} {outcome.text}".strip()
            raise NotMoved(f"{verb} of process {pid}: {why}", name=outcome.name)

    async def _call(self, verb: str, pids: Iterable[int], arguments: list[Any], seconds: float) -> pool.Results:
        worker = await self._take()
        try:
            return await worker.call(verb, pids, arguments, seconds=seconds)
        finally:
            await self._workers.give(worker)

    async def _take(self) -> pool.Worker:
        try:
            return await self._workers.take()
        except pool.DriverUnavailable as error:
            raise RpcError(Code.UNAVAILABLE, str(error)) from error


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _outcome(pid: int, results: pool.Results, seconds: float) -> wire.Outcome:
    answer = results.answers.get(pid)
    if answer:
        kind = wire.Outcome.REFUSED if answer["code"] else wire.Outcome.DONE
        fields = {key: answer[key] for key in ("code", "name", "text", "seconds")}
        return wire.Outcome(pid=pid, kind=kind, **fields)
    if results.timed_out:
        return wire.Outcome(pid=pid, kind=wire.Outcome.DEADLINE, text=f"no answer after {seconds:g} s", seconds=seconds)
    return wire.Outcome(pid=pid, kind=wire.Outcome.WORKER_DIED, text=results.failure)


async def serve(path: Path, settings: NodeSettings, arena: Path, log: Any) -> None:
    """Serve on `path` until nobody has called for long enough, or SIGTERM; `arena` is the directory of the arena."""
    workers = pool.Workers()
    helper = Helper(workers, settings, arena, log)
    pool_keeper = PoolKeeper(log)
    server = Server(
        helper.services(),
        on_error=lambda call, error: log.error("cuda.call_failed", method=call.method, error=repr(error)),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start(_listen(path))
    log.info("cuda.helper_started", socket=str(path), idle_seconds=settings.read().helper_idle)
    try:
        await _until_idle(helper, pool_keeper, stop)
    finally:
        path.unlink(missing_ok=True)  # first, so that nobody connects to a listener that is about to close
        await server.close()
        await workers.close()
        await helper.keeper.close()
        await pool_keeper.close()
        log.info("cuda.helper_ended")


async def _until_idle(helper: Helper, pool_keeper: PoolKeeper, stop: asyncio.Event) -> None:
    """Wait until nobody has called for so long as is set; meanwhile, undo what killed shims have left switched on.

    And make memory for images, a moment after the last call, so as not to be in the way of what follows one.
    """
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        now = await helper.look()
        pages.restore_node()
        await helper.keeper.tidy(loop.time())
        if not helper.running and loop.time() - helper.last_call >= LOOK_SECONDS:
            pool_keeper.tidy(loop.time(), now.image_pool, now.image_pool_files)
        busy = helper.running or helper.keeper.stranded
        left = helper.last_call + now.helper_idle - loop.time() if not busy else LOOK_SECONDS
        if left <= 0:
            return
        try:
            async with asyncio.timeout(min(left, LOOK_SECONDS)):
                await stop.wait()
        except TimeoutError:
            pass


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a helper that was killed: we hold the lock, so none lives
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)
    return listener


def _claim(path: Path) -> TextIO | None:
    """Become the helper of the socket `path`: return the locked file to keep open, or None when there is one."""
    make_directory(path.parent)
    lock = path.with_name(f"{path.name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kybernate-cuda-helper", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="(as the node's configuration says)")
    parser.add_argument(
        "--arena",
        type=from_text,
        metavar="SIZES",
        help="its bytes, or NODE:BYTES,… for NUMA nodes (as the node's configuration says)",
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH, metavar="FILE", help="the node's configuration")
    parser.add_argument("--arena-folder", type=Path, default=FOLDER, metavar="PATH")
    parser.add_argument("--arena-share", type=float, metavar="SHARE", help="of it, that one pod may have: 0 to 1")
    arguments = parser.parse_args(argv)
    os.umask(NO_OTHERS)  # of its workers as well: no container inherits it
    lock = _claim(arguments.socket)
    if lock is None:
        return 0
    with lock:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):  # the helper must see all GPUs of the node
            os.environ.pop(name, None)
        log = structlog.wrap_logger(
            structlog.WriteLogger(sys.stderr),
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
                structlog.processors.JSONRenderer(default=str),
            ],
        )
        fixed = {
            "arena": arguments.arena,
            "arena_share": arguments.arena_share,
            "helper_idle": arguments.idle,
        }
        settings = NodeSettings(LiveConfig(log, arguments.config), fixed)
        asyncio.run(serve(arguments.socket, settings, arguments.arena_folder, log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
