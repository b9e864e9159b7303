"""The shim's side of the CUDA helper: connects, starts the helper when none runs, and turns outcomes into errors."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf.message import Message

from kybernate_shim.gpu.errors import (
    CudaError,
    CudaHelperLost,
    CudaUnavailable,
    GpuPair,
    cuda_call_failed,
    cuda_call_unanswered,
    join,
)
from kybernate_shim.gpu.helper_answers import (
    ArenaMoved,
    CudaInfo,
    CudaProcess,
    NodeGpu,
    RoomComing,
    State,
    States,
)
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.run_directory import RUN
from kybernate_shim.ttrpc import Client, Code, RpcError

SERVICE: Final = wire.DESCRIPTOR.services_by_name["Cuda"].full_name
SOCKET = RUN / "cuda.sock"
START_SECONDS = 20.0
START_AGAIN_SECONDS = 5.0  # after a start without effect
STATES_SECONDS = 10.0
INFO_SECONDS = 60.0
# The helper answers by itself when a process's time is over; this is the additional time for the answer, including
# cuInit.
SLACK_SECONDS = 75.0
MOVE_ATTEMPTS = 3

Reply = TypeVar("Reply", bound=Message)


class CudaHelper:
    """A connection to the node's CUDA helper, made again when it has ended; `pids` are the host's.

    The methods that change processes call the driver on all `pids` in parallel, wait for every one of them, and return
    the seconds that each took. They raise the first failure, with the others as its notes:
    CudaCallFailed, of which `done` names the processes that went through, CudaHelperLost when that is
    not known, CudaUnavailable when nothing was asked at all.
    """

    def __init__(self, socket: Path = SOCKET, *, start: bool = True, idle_seconds: float | None = None) -> None:
        """With `start`, a helper that does not run is started; it ends after `idle_seconds` without a call."""
        self._socket = socket
        self._start = start
        self._idle_seconds = idle_seconds
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def info(self) -> CudaInfo:
        """Describe the driver and the GPUs."""
        reply = await self._ask("Info", wire.InfoRequest(), wire.InfoResponse, INFO_SECONDS)
        return CudaInfo(
            driver_version=reply.driver_version,
            api_version=reply.api_version,
            gpus=tuple(_gpu(device) for device in reply.devices),
            missing_calls=tuple(reply.missing_calls),
        )

    async def states(self, pids: Sequence[int], timeout: float = STATES_SECONDS) -> States:
        """Ask which of `pids` hold CUDA state, and in which state they are. Processes that are gone hold none.

        A stopped or frozen process does not answer and is in `unknown` after `timeout`, and so is one in the middle of
        a checkpoint.
        """
        if not pids:
            return States({}, {})
        request = wire.StatesRequest(pids=pids, timeout_ms=_milliseconds(timeout))
        reply = await self._ask("States", request, wire.StatesResponse, timeout + SLACK_SECONDS)
        return States(
            {it.pid: CudaProcess(it.pid, State(it.state), it.restore_thread, it.arena_bytes) for it in reply.processes},
            {it.pid: _error("state", it, timeout, ()) for it in reply.unknown},
        )

    async def lock(self, pids: Sequence[int], timeout: float) -> dict[int, float]:
        """Let queued work drain, at most `timeout` seconds, and keep new calls to the driver waiting."""
        return await self._verb("Lock", pids, timeout)

    async def checkpoint(
        self, pids: Sequence[int], timeout: float, *, threads_stopped: bool = False
    ) -> dict[int, float]:
        """Move the VRAM of locked processes into their own host memory; the GPU is free afterwards.

        Their threads are stopped meanwhile, by the helper unless the caller has done that (see `linux.ptrace.covers`).
        """
        return await self._verb("Checkpoint", pids, timeout, threads_stopped=threads_stopped)

    async def restore(self, pids: Sequence[int], timeout: float, pairs: Sequence[GpuPair] = ()) -> dict[int, float]:
        """Reload it; the processes stay locked. `pairs` is a permutation of all GPUs of the node, or nothing.

        A restore that runs out of VRAM loses its process, so the caller looks at `info` before.
        """
        if not pids:
            return {}
        request = wire.RestoreRequest(pids=pids, timeout_ms=_milliseconds(timeout))
        for pair in pairs:
            request.gpu_pairs.add(old_uuid=pair.old, new_uuid=pair.new)
        reply = await self._change("Restore", request, timeout)
        return _seconds("restore", reply, timeout)

    async def unlock(self, pids: Sequence[int], timeout: float) -> dict[int, float]:
        """Let locked processes continue."""
        return await self._verb("Unlock", pids, timeout)

    async def warm(self, pids: Sequence[int], timeout: float) -> None:
        """Prepare the arena for what `offload` will move out of running processes. This is only for speed."""
        await self._move("Warm", pids, timeout)

    async def expect(self, pid: int, gpus: Iterable[str], timeout: float) -> None:
        """Prepare the arena to reload what process `pid` has there into others, which will be restored on `gpus`.

        Nothing depends on it.
        """
        request = wire.ExpectRequest(pid=pid, gpu_uuids=gpus, timeout_ms=_milliseconds(timeout))
        client = await self._connected()
        await self._call(client, "Expect", request, wire.VerbResponse, timeout + SLACK_SECONDS)

    async def offload(self, pids: Sequence[int], timeout: float) -> ArenaMoved:
        """Move the VRAM of locked processes into the node's arena, where that is possible; they stay locked."""
        return await self._move("Offload", pids, timeout)

    async def prefetch(self, pid: int, gpu: str, free_bytes: int, timeout: float, *, room_comes: bool = False) -> None:
        """Begin to copy what `reload` will move to the GPU that a process is being restored on.

        `free_bytes` stay free there; with `room_comes`, it waits for what another process gives up. This is only for
        speed; the GPU's memory is freed by a `reload`, a `checkpoint`, or a restore that fails.
        """
        milliseconds = _milliseconds(timeout)
        request = wire.PrefetchRequest(
            pid=pid, gpu_uuid=gpu, free_bytes=free_bytes, timeout_ms=milliseconds, room_comes=room_comes
        )
        client = await self._connected()
        await self._call(client, "Prefetch", request, wire.VerbResponse, timeout + SLACK_SECONDS)

    async def reload(self, pids: Sequence[int], timeout: float, coming: RoomComing | None = None) -> ArenaMoved:
        """Move what the arena has of locked processes back to VRAM, where room may become free only gradually.

        They stay locked.
        """
        return await self._move("Reload", pids, timeout, coming)

    async def _move(
        self, method: str, pids: Sequence[int], timeout: float, coming: RoomComing | None = None
    ) -> ArenaMoved:
        if not pids:
            return ArenaMoved()
        request = wire.VerbRequest(pids=pids, timeout_ms=_milliseconds(timeout))
        if coming is not None:
            request.room_gpu_uuid, request.room_ms = coming.gpu, _milliseconds(coming.seconds)
        client = await self._connected()
        # A process may be locked, stopped and settled several times before the helper gives up.
        reply = await self._call(client, method, request, wire.VerbResponse, MOVE_ATTEMPTS * timeout + SLACK_SECONDS)
        _seconds(method.lower(), reply, timeout)
        return ArenaMoved(
            {outcome.pid: outcome.bytes for outcome in reply.outcomes},
            {outcome.pid: outcome.text for outcome in reply.outcomes if outcome.text},
            sum(outcome.spared_bytes for outcome in reply.outcomes),
        )

    async def _verb(
        self, method: str, pids: Sequence[int], timeout: float, *, threads_stopped: bool = False
    ) -> dict[int, float]:
        if not pids:
            return {}
        request = wire.VerbRequest(pids=pids, timeout_ms=_milliseconds(timeout), threads_stopped=threads_stopped)
        return _seconds(method.lower(), await self._change(method, request, timeout), timeout)

    async def _change(self, method: str, request: Message, timeout: float) -> wire.VerbResponse:
        """Make a call that must not be repeated."""
        client = await self._connected()
        return await self._call(client, method, request, wire.VerbResponse, timeout + SLACK_SECONDS)

    async def _ask(self, method: str, request: Message, reply: type[Reply], seconds: float) -> Reply:
        """Make a call that changes nothing: if the helper ends during it, since it was idle, ask the next one."""
        client = await self._connected()
        try:
            return await self._call(client, method, request, reply, seconds)
        except CudaHelperLost:
            return await self._call(await self._connected(), method, request, reply, seconds)

    async def _call(self, client: Client, method: str, request: Message, reply: type[Reply], seconds: float) -> Reply:
        try:
            return await client.call(SERVICE, method, request, reply, timeout=seconds)
        except TimeoutError as error:
            raise CudaHelperLost(f"CUDA {method}: the helper has not answered for {seconds:g} s") from error
        except ConnectionError as error:
            raise CudaHelperLost(f"CUDA {method}: the helper ended before it answered: {error}") from error
        except RpcError as error:
            if error.code is Code.UNAVAILABLE:
                raise CudaUnavailable(error.message) from error
            raise CudaHelperLost(f"CUDA {method}: the helper answered {error}") from error

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None or self._client.closed:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Client:
        """Connect; start a helper when none listens, and again when that one is killed before it listens.

        Raises CudaUnavailable.
        """
        loop = asyncio.get_running_loop()
        started = -math.inf
        try:
            async with asyncio.timeout(START_SECONDS):
                while True:
                    try:
                        return await Client.connect(str(self._socket))
                    except (FileNotFoundError, ConnectionRefusedError) as error:
                        if not self._start:
                            raise CudaUnavailable(f"no CUDA helper listens on {self._socket}") from error
                    if loop.time() - started >= START_AGAIN_SECONDS:
                        started = loop.time()
                        start_helper(self._socket, self._idle_seconds)
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise CudaUnavailable(
                f"the CUDA helper did not listen on {self._socket} after {START_SECONDS:g} s; "
                f"{log_path(self._socket)} shows why"
            ) from error
        except OSError as error:
            raise CudaUnavailable(f"the CUDA helper on {self._socket} cannot be reached: {error}") from error


@asynccontextmanager
async def cuda_helper(
    socket: Path = SOCKET, *, start: bool = True, idle_seconds: float | None = None
) -> AsyncIterator[CudaHelper]:
    """Use the node's CUDA helper; the connection is closed at the end; the helper keeps running for the node."""
    helper = CudaHelper(socket, start=start, idle_seconds=idle_seconds)
    try:
        yield helper
    finally:
        await helper.close()


def log_path(socket: Path) -> Path:
    """Return the file that a helper on `socket` logs to."""
    return socket.with_suffix(".log")


def start_helper(socket: Path, idle_seconds: float | None = None, options: Sequence[str] = ()) -> int:
    """Start a helper in its own session, which outlives this process, and return its pid.

    `options` are appended to its command line. Of several helpers that are started concurrently, all but one end by
    themselves. The caller's process must reap the child; a shim reaps all of its children in one place.
    """
    make_directory(socket.parent)
    command = [sys.executable, "-m", "kybernate_shim.cuda_helper.helper", "--socket", str(socket)]
    if idle_seconds is not None:
        command += ["--idle", str(idle_seconds)]
    command += options
    log = (os.POSIX_SPAWN_OPEN, 1, str(log_path(socket)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    actions = [nothing, log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    # Neither it nor its workers look for modules in the directory where `kybernate` was called, which may belong to
    # another user.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _gpu(device: wire.Device) -> NodeGpu:
    free, number = (device.free_bytes, device.number) if device.free_known else (None, None)
    holdings = {it.pid: it.bytes for it in device.holdings}
    computed = {it.pid: it.microseconds for it in device.computed} if device.computed_known else None
    return NodeGpu(
        device.uuid,
        device.name,
        device.total_bytes,
        free,
        device.mig,
        number,
        holdings,
        device.numa_node,
        computed,
        {link.uuid: link.path for link in device.links},
        device.sampled_microseconds,
    )


def _seconds(verb: str, reply: wire.VerbResponse, timeout: float) -> dict[int, float]:
    """Return the seconds per pid, or raise the first failure with the others as its notes."""
    done = {it.pid: it.seconds for it in reply.outcomes if it.kind == wire.Outcome.DONE}
    errors = [_error(verb, it, timeout, tuple(done)) for it in reply.outcomes if it.kind != wire.Outcome.DONE]
    if errors:
        raise join(errors)
    return done


def _error(verb: str, outcome: wire.Outcome, timeout: float, done: Sequence[int]) -> CudaError:
    if outcome.kind == wire.Outcome.DEADLINE:
        return cuda_call_unanswered(verb, outcome.pid, timeout, done=done)
    if outcome.kind == wire.Outcome.WORKER_DIED:
        return cuda_call_failed(verb, outcome.pid, "worker died", outcome.text, done=done)
    return cuda_call_failed(verb, outcome.pid, outcome.name, outcome.text, done=done)
