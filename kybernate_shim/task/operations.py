"""What happens to a container's state as a whole: checkpoint, restore, suspend, park, resume.

`Container` holds its lock and has checked its state when it calls. This module, and with it all code for CRIU and GPUs,
is loaded with the first operation of a daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint.dump import dump
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.hold import FrozenHold, Over
from kybernate_shim.checkpoint.image.copies import in_use, still_there
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.errors import Cancelled, Failed, Refused
from kybernate_shim.gpu.evidence import holders, seen
from kybernate_shim.linux.process import has_ended
from kybernate_shim.logs import Log
from kybernate_shim.task.audited import NO_IMAGE, audit, image_ref
from kybernate_shim.task.checkpointing import share_with_cri
from kybernate_shim.task.codes import rpc_error
from kybernate_shim.task.lifecycle import after
from kybernate_shim.task.operation_work import OperationWork
from kybernate_shim.task.outcomes import Ending, Ledger, Outcome, to_cancel
from kybernate_shim.task.requests import Requests
from kybernate_shim.task.restoring import operation_of_restore, restored_in_time
from kybernate_shim.trust.audit import Decision, ImageRef, Verb, decision_of
from kybernate_shim.trust.caller import CALLER
from kybernate_shim.undo import AsyncUndo, Undo, in_words

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.gpu.accelerator import CudaAccelerator
    from kybernate_shim.checkpoint.gpu.left import ArenaUse, Left
    from kybernate_shim.task.container import Container

EXIT_SECONDS = 5.0
POLL_SECONDS = 0.01
# The others end with the container's processes; what is about the disk would keep a delete waiting.
ABORTED_BY_KILL = frozenset({"checkpoint", "restore", "park", "unpark"})  # verbs and steps
STARTED, ENDED = "/kybernate/shim/started", "/kybernate/shim/ended"  # topics of events about operations
DONE = {
    "checkpoint": "checkpointed", "restore": "restored", "suspend": "suspended", "park": "parked", "resume": "resumed",
}  # fmt: skip


class Operations:
    """The operations on one container, one at a time. `current` is the one that runs now.

    `ledger` knows how the last ones ended, and `requests` carries out each named one once.
    """

    def __init__(self, container: Container, log: Log) -> None:
        self.current: Operation | None = None
        self.ledger = Ledger()
        self.requests = Requests(container.id, self.ledger)
        self._container = container
        self._log = log
        self._gpus: CudaAccelerator | None = None
        self._image = NO_IMAGE  # of the current operation
        self._work = OperationWork(container)
        self._over: asyncio.Future[Outcome] | None = None
        self.held: FrozenHold | None = None
        self._holding: asyncio.Task[Exception | None] | None = None

    @property
    def running_id(self) -> str:
        """The name of the running operation, else of the first waiting one; may be empty."""
        if self.current is not None:
            return self.current.id
        return self.requests.waiting[0].id if self.requests.waiting else ""

    async def checkpoint(self, request: DumpRequest, id: str = "") -> tuple[Dumped, Operation]:
        """Write an image. Raises Aborted after `abort`, Cancelled, and whatever `dump` raises.

        With `request.hold` the container is held when this returns, unless it has ended.
        """
        container = self._container
        hold = FrozenHold(request.hold) if request.hold else None
        if hold is not None:
            after(container.init.state, "hold")
        with self._operating("checkpoint", ImageRef(str(request.image)), id=id) as operation:
            async with AsyncUndo() as undo:
                undo.push_async_callback(self._kill_frozen, operation)
                if hold is None:
                    dumped = await self._work.run(operation, self._dump(request, operation))
                else:
                    work = self._dump(request, operation, hold)
                    dumped, goes_on = await self._work.run_until(operation, work, hold.begun)
                    self._hold(hold, goes_on)
            self._image = image_ref(request.image, dumped.manifest, dumped.digest)
            operation.image_bytes = dumped.manifest.bytes
        share_with_cri(container.bundle.path, container.namespace, container.id, request.work)
        if request.exit:
            await asyncio.wait_for(container.init.wait(), EXIT_SECONDS)
        return dumped, operation

    async def _dump(self, request: DumpRequest, operation: Operation, hold: FrozenHold | None = None) -> Dumped:
        gpus = self._accelerator() if await self._driver_pids() else None
        return await dump(self._container, request, operation, self._log, gpus, hold)

    # -- Hold ---------------------------------------------------------------------------------------------------------

    def _hold(self, hold: FrozenHold, goes_on: asyncio.Task[Dumped]) -> None:
        """Enter the hold, unless the container has ended; `goes_on` ends when the container runs on or has ended."""
        if self._container.init.state == "running":
            self._container.init.move("hold")
            self._log.info("hold.started", seconds=round(hold.seconds_left, 1))
        else:
            hold.finish("ended")
        self.held = hold
        self._holding = asyncio.ensure_future(self._until_free(hold, goes_on))

    async def _until_free(self, hold: FrozenHold, goes_on: asyncio.Task[Dumped]) -> Exception | None:
        """Return the failure to resume the container, if any, once it runs on or has ended."""
        CALLER.set(None)  # another call ends it, or none
        container, how = self._container, await asyncio.shield(hold.over)
        returns = how != "ended" and self._gpus is not None
        if returns:
            container.gpu.begin("resume")
        failure: Exception | None = None
        try:
            await goes_on
        except Exception as error:  # noqa: BLE001  # the answer of who has released it, and in the log
            failure = error
            self._log.error("task.release_failed", error=in_words(error))
        if returns:
            away = self._gpus is not None and self._gpus.suspended is not None
            container.gpu.end("still away" if away else "not back" if failure is not None else "done")
        self.held = None
        if how != "ended" and container.init.state == "held":
            container.init.move("release")
        self._note_end_of_hold(how, failure)
        return failure

    def _note_end_of_hold(self, how: Over, failure: Exception | None) -> None:
        if how == "expired":
            self._log.warning("hold.expired", state=self._container.in_words)
            self._audit_release(failure)
        else:
            self._log.info("hold.ended", how=how)
        self._container.announce(ENDED, verb="release", outcome=how)

    def _audit_release(self, failure: Exception | None) -> None:
        decision: Decision = "done" if failure is None else "failed"
        audit(self._container, "release", decision, self._image, self._log, error=failure)

    async def release(self) -> None:
        """Let a held container run on, and return when it does. Raises Refused, and why it does not."""
        hold, holding = self.held, self._holding
        if hold is None or holding is None:
            raise Refused(f"container {self._container.id} is not held. Nothing was changed")
        hold.finish("released")
        failure = await asyncio.shield(holding)
        if hold.over.result() == "ended":
            raise Refused(f"container {self._container.id} has ended while it was held")
        self._audit_release(failure)
        if failure is not None:
            raise failure

    async def end_held(self) -> None:
        """Kill a held container, which does nothing after its image, and return when its processes are killed."""
        if self.held is not None and self._holding is not None:
            self.held.finish("ended")
            await asyncio.shield(self._holding)

    async def _kill_frozen(self, operation: Operation) -> None:
        """Kill it where a kill has ended the checkpoint, and wait: the caller checks the result immediately."""
        cgroup, init = self._container.cgroup, self._container.init
        if operation.killed.is_set() and cgroup is not None:
            # If it was frozen before, it is frozen again, and SIGKILL would wait for a thaw.
            await asyncio.to_thread(cgroup.kill)
            await asyncio.to_thread(_await_end, init.pid)

    # -- Ending before the end ----------------------------------------------------------------------------------------

    def abort(self) -> bool:
        """End what runs and would outlast its container, which is killed; return whether anything does.

        The end of a checkpoint then kills the container, too: see _kill_frozen.
        """
        operation = self.current
        if operation is None or operation.stoppable == "never":
            return False
        if ABORTED_BY_KILL.isdisjoint((operation.verb, operation.step_name)):
            return False
        operation.killed.set()
        self._work.stop(operation)
        return True

    async def cancel(self, id: str, by: str) -> Outcome:
        """Undo the operation of that name, or whatever runs for an empty one, and return how it has ended.

        What cannot be stopped any more completes. Raises Missing and NothingToCancel.
        """
        waiting = self.requests.waiting
        running = [self.current.id] if self.current is not None else []
        which = to_cancel(id, [*running, *(one.id for one in waiting)], self.ledger, self._container.id)
        if isinstance(which, Outcome):
            return which
        if which >= len(running):
            return await waiting[which - len(running)].cancel(by)
        assert self.current is not None
        assert self._over is not None
        over = self._over
        if self.current.stoppable == "always" and self._work.stop(self.current):
            self.current.cancelled_by = by
        return await asyncio.shield(over)

    # -- Restore ------------------------------------------------------------------------------------------------------

    async def restore(self, image: Image) -> None:
        """Bring the processes of `image` to life. After a failure the container is as before and can be deleted.

        All steps together may take `deadlines.restore`. Raises Aborted after `abort`, Cancelled, TimeoutError,
        and whatever the steps raise.
        """
        image = still_there(image, self._container.config)
        ref = image_ref(image.path, image.manifest, image.digest)
        id = operation_of_restore(self._container, self._log)
        with self._operating("restore", ref, id=id) as operation, in_use(image.path):
            gpus = self._accelerator() if image.manifest.has_gpu_state else None
            await self._work.run(operation, restored_in_time(self._container, image, operation, self._log, gpus))

    # -- GPUs ---------------------------------------------------------------------------------------------------------

    @property
    def arena_use(self) -> ArenaUse | None:
        """What our suspend has moved into the arena and is not parked."""
        left = self._gpus.suspended if self._gpus is not None else None
        if left is None or not left.parked:
            return left.arena_use if left is not None else None
        return replace(left.arena_use, bytes=max(0, left.arena_use.bytes - left.parked_bytes))

    @property
    def vram_bytes(self) -> int:
        """VRAM that has left the GPUs by our suspend."""
        left = self._gpus.suspended if self._gpus is not None else None
        return left.vram_bytes if left is not None else 0

    @property
    def parked_bytes(self) -> int:
        """How much of that is on the disk."""
        left = self._gpus.suspended if self._gpus is not None else None
        return left.parked_bytes if left is not None else 0

    def discard(self) -> None:
        """Remove what is parked of a container that has ended. Blocks."""
        if self._gpus is not None:
            self._gpus.discard()

    async def _driver_pids(self) -> list[int]:
        """Return the processes that have loaded the CUDA driver, as the host sees them. Raises TimeoutError."""
        cgroup = self._container.cgroup
        return await seen(lambda: holders(cgroup.processes())) if cgroup is not None else []

    async def suspend(self, lock_seconds: float = 0, id: str = "") -> tuple[Left, Operation]:
        """Move VRAM into host memory; the processes wait."""
        with self._operating("suspend", id=id) as operation:
            work = self._accelerator().suspend(operation, force=False, lock_seconds=lock_seconds)
            with self._of_the_living(operation):
                left = await self._work.run(operation, work)
            operation.vram_bytes = left.vram_bytes
            operation.fields = {"vram_bytes": left.vram_bytes, "arena_bytes": left.arena_use.bytes}
            if left.arena_use.reasons:
                operation.fields["arena_reasons"] = left.arena_use.reasons
            return left, operation

    async def park(self, id: str = "") -> tuple[Left, Operation]:
        """Move the VRAM of the suspended container from host memory to the disk, within the time of a checkpoint."""
        with self._operating("park", id=id) as operation:
            with self._of_the_living(operation):
                async with operation.within(self._container.config.deadlines.checkpoint):
                    left = await self._work.run(operation, self._accelerator().park(operation))
            operation.vram_bytes = left.parked_bytes
            operation.fields = {"parked_bytes": left.parked_bytes}
            return left, operation

    async def unsuspend(
        self, restore_seconds: float = 0, room_seconds: float = 0, id: str = ""
    ) -> tuple[Left, Operation]:
        """Move it back. Raises NothingToResume."""
        with self._operating("resume", id=id) as operation:
            work = self._accelerator().resume(operation, restore_seconds=restore_seconds, room_seconds=room_seconds)
            with self._of_the_living(operation):
                left = await self._work.run(operation, work)
            operation.vram_bytes = left.vram_bytes
            return left, operation

    @contextmanager
    def _of_the_living(self, operation: Operation) -> Iterator[None]:
        """Raise Refused where the container has ended meanwhile, whatever error its missing processes have caused."""
        failure: Exception | None = None
        try:
            yield
        except (Refused, Failed) as error:
            failure = error
        if has_ended(self._container.init.pid):
            raise Refused(f"container {self._container.id} has ended during the {operation.verb}") from failure
        if failure is not None:
            raise failure

    async def suspend_if_on_gpu(self) -> None:
        if await self._driver_pids():
            await self.suspend()

    async def unsuspend_if_on_gpu(self) -> None:
        if await self._driver_pids():
            from kybernate_shim.checkpoint.gpu.errors import NothingToResume

            try:
                await self.unsuspend()
            except NothingToResume:
                pass  # it was paused before it had any GPU state

    def _accelerator(self) -> CudaAccelerator:
        """Return the accelerator, whose modules are not loaded on a node without GPUs."""
        if self._gpus is None:
            from kybernate_shim.checkpoint.gpu.accelerator import CudaAccelerator

            self._gpus = CudaAccelerator(self._container, self._container.cleanup.record_locked, self._log)
        return self._gpus

    @contextmanager
    def _operating(self, verb: Verb, image: ImageRef = NO_IMAGE, *, id: str = "") -> Iterator[Operation]:
        """Keep the record of an operation while it runs, also for `delete`, log what it cost, and audit it."""
        container = self._container
        container.gpu.begin(verb)
        self.current = operation = Operation(verb, id)
        self._image = image
        self._over = asyncio.get_running_loop().create_future()
        self.requests.begin_by(asyncio.current_task())
        outcome, failure = "failed", None
        with Undo() as undo:
            undo.callback(lambda: self._end(operation, outcome, failure))
            try:
                container.cleanup.record_phase(verb)
                container.announce(STARTED, verb=verb, image=image.path)
                yield operation
                outcome = "done"
            except BaseException as error:
                outcome, failure = self._outcome_of(error), error
                self._log.error(
                    f"task.{verb}_failed",
                    error=in_words(error),
                    step_seconds=operation.summary(),
                    **({"frozen_ms": operation.frozen_ms} if operation.frozen_ms else {}),
                )
                audit(
                    container, verb, decision_of(error), self._image, self._log, error=error, seconds=operation.seconds
                )
                raise
            else:
                self._log.info(
                    f"task.{DONE[verb]}", pid=container.init.pid, step_seconds=operation.summary(), **operation.fields
                )
                audit(container, verb, "done", self._image, self._log, seconds=operation.seconds)

    def _end(self, operation: Operation, outcome: str, failure: BaseException | None) -> None:
        self.current = None
        self._container.gpu.end(outcome)
        ended = self._ended(operation, failure)
        self.ledger.add(ended)
        if self._over is not None and not self._over.done():
            self._over.set_result(ended)
        self._container.cleanup.record_phase("idle")
        # For a cancelled operation, the outcome only says where the GPU state is.
        said = "cancelled" if isinstance(failure, Cancelled) else outcome
        self._container.announce(ENDED, verb=operation.verb, outcome=said, image=self._image.path, **ended.labels)

    def _ended(self, operation: Operation, failure: BaseException | None) -> Outcome:
        """Return the outcome of an operation whose end the container's states already reflect."""
        answer = rpc_error(failure) if isinstance(failure, Exception) else None
        ending: Ending = "succeeded"
        if failure is not None:
            ending = "cancelled" if isinstance(failure, Cancelled) else "failed"
        return Outcome(
            operation.id,
            operation.verb,
            ending,
            at=time.monotonic(),
            seconds=operation.seconds,
            code=answer.code.name if answer is not None else "",
            error=answer.message if answer is not None else str(failure or ""),
            state=self._container.in_words if failure is not None else "",
            steps=tuple(operation.steps),
            image_bytes=operation.image_bytes,
            frozen_ms=operation.frozen_ms,
            vram_bytes=operation.vram_bytes,
            source=operation.source,
            path=self._image.path if failure is None else "",
            manifest_digest=self._image.manifest_digest if failure is None else "",
        )

    def _outcome_of(self, error: BaseException) -> str:
        """Return what a failure has led to, as the table of GPU states has it."""
        if self._gpus is None:
            return "failed"
        from kybernate_shim.checkpoint.gpu.errors import NothingToResume
        from kybernate_shim.checkpoint.target import NotBack

        if isinstance(error, NothingToResume):
            return "nothing to do"
        if isinstance(error, NotBack):
            return "still away" if self._gpus.suspended is not None else "not back"
        return "failed"


def _await_end(pid: int) -> None:
    """Wait until a process that was killed has ended, but not for long; blocks."""
    end = time.monotonic() + EXIT_SECONDS
    while not has_ended(pid) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
