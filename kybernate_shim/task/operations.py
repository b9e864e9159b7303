"""What happens to a container's state as a whole: checkpoint, restore, suspend, resume.

`Container` holds its lock and has checked its state when it calls. This module, and with it all that knows of CRIU and
of GPUs, is loaded with the first operation of a daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint import loopback, restore
from kybernate_shim.checkpoint.cgroup_lease import leased
from kybernate_shim.checkpoint.dump import Dumped, DumpRequest, dump
from kybernate_shim.checkpoint.image import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.plaintext import plaintext
from kybernate_shim.cuda.evidence import holds_driver
from kybernate_shim.errors import Aborted
from kybernate_shim.linux.namespaces import CLONE_NEWNET, in_namespace
from kybernate_shim.logs import Log
from kybernate_shim.oci import gpu_spec
from kybernate_shim.oci.spec import edit_spec
from kybernate_shim.task.audited import NO_IMAGE, audit, image_ref
from kybernate_shim.task.checkpointing import share_with_cri, work_directory
from kybernate_shim.trust.audit import ImageRef, Verb, decision_of
from kybernate_shim.trust.requester import requester_of
from kybernate_shim.trust.rights import Right, may
from kybernate_shim.undo import Undo, in_words

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.gpu import ArenaUse, CudaAccelerator, Left
    from kybernate_shim.task.container import Container

EXIT_SECONDS = 5.0
DONE = {"checkpoint": "checkpointed", "restore": "restored", "suspend": "suspended", "resume": "resumed"}


class CheckpointAborted(Aborted):
    """The container was killed while it was being checkpointed; there is no image."""


class RestoreAborted(Aborted):
    """The container was killed while it was being restored; nothing of it is left."""


class Operations:
    """The operations on one container, one at a time. `current` is the one that runs now."""

    def __init__(self, container: Container, log: Log) -> None:
        self.current: Operation | None = None
        self._container = container
        self._log = log
        self._gpus: CudaAccelerator | None = None
        self._dump: asyncio.Task[Dumped] | None = None
        self._image = NO_IMAGE  # that the current operation is about
        self._restoring: asyncio.Task[None] | None = None

    async def checkpoint(self, request: DumpRequest) -> tuple[Dumped, Operation]:
        """Write an image. Raises CheckpointAborted after `abort`, and whatever `dump` raises."""
        container = self._container
        with self._operating("checkpoint", ImageRef(str(request.image))) as operation:
            gpus = self._accelerator() if self.driver_pids() else None
            self._dump = asyncio.ensure_future(dump(container, request, operation, self._log, gpus))
            with Undo() as undo:
                undo.callback(self._end_dump)
                try:
                    dumped = await asyncio.shield(self._dump)
                except asyncio.CancelledError:
                    if self._dump.cancelled():
                        raise CheckpointAborted(
                            f"checkpoint of container {container.id} ended: it was killed"
                        ) from None
                    raise
            self._image = image_ref(request.image, dumped.manifest, dumped.digest)
        share_with_cri(container.bundle.path, container.namespace, container.id, request.work)
        if request.exit:
            await asyncio.wait_for(container.init.wait(), EXIT_SECONDS)
        return dumped, operation

    def _end_dump(self) -> None:
        dump, self._dump = self._dump, None
        cgroup = self._container.cgroup
        if dump is not None and dump.cancelling() and cgroup is not None:
            cgroup.kill()  # if it came frozen it is so again, and SIGKILL would wait for a thaw

    def abort(self) -> None:
        """End a checkpoint or a restore that runs; once only: a repeated kill must not disturb the undo."""
        for running in (self._dump, self._restoring):
            if running is not None and not running.cancelling():
                running.cancel()

    async def restore(self, image: Image) -> None:
        """Bring the processes of `image` to life. After a failure the container is as before and can be deleted.

        All steps together may take `deadlines.restore`. Raises RestoreAborted after `abort`, TimeoutError, and whatever
        the steps raise.
        """
        container = self._container
        self._restoring = asyncio.ensure_future(self._restored_in_time(image))
        try:
            await asyncio.shield(self._restoring)
        except asyncio.CancelledError:
            if self._restoring.cancelled():
                raise RestoreAborted(f"restore of container {container.id} ended: it was killed") from None
            self._restoring.cancel()
            await asyncio.wait({self._restoring})
            raise
        finally:
            self._restoring = None

    async def _restored_in_time(self, image: Image) -> None:
        seconds = self._container.config.deadlines.restore
        try:
            async with asyncio.timeout(seconds or None) as limit:
                await self._restore_from(image)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"restore of container {self._container.id} failed, nothing is left of it: it had not ended after"
                f" {seconds:g} s; deadlines.restore sets the limit"
            ) from error

    async def _restore_from(self, image: Image) -> None:
        container = self._container
        with self._operating("restore", image_ref(image.path, image.manifest, image.digest)) as operation:
            async with plaintext(container, image, operation) as plain:
                await self._restore(plain, operation)

    async def _restore(self, image: Image, operation: Operation) -> None:
        container = self._container
        stdio = container.init.stdio
        assert stdio is not None
        work = work_directory(container.config, container.namespace, container.id, "restore")
        with (
            leased(container.spec.cgroups_path, container.bundle.path),
            container.children.early_exits() as early,
        ):
            gpus = self._accelerator() if image.manifest.has_gpu_state else None
            if gpus is not None:
                container.spec = await gpu_spec.prepare_restore(
                    container.runtime,
                    container.bundle,
                    container.id,
                    believe_environment=may(requester_of(container.spec), Right.VISIBLE_DEVICES, container.config),
                )
            prepared = await restore.prepare(container, image, operation, self._log, work=work, accelerator=gpus)
            if prepared.inspection.internet_sockets and loopback.is_own(container.spec.document):
                container.spec = edit_spec(container.bundle.path, loopback.add_hook)
            async with gpus.expecting(image) if gpus is not None else nullcontext():
                try:
                    async with restore.complete_or_gone(container):
                        await restore.run(container, prepared, operation, fds=stdio.fds, console=stdio.console_socket)
                        await stdio.started()
                        container.find_init()
                        await self._switch_loopback_on()
                        if gpus is not None:
                            await gpus.attach(image, operation)
                except BaseException:
                    container.lose_init()
                    raise
            container.restored(early)

    async def _switch_loopback_on(self) -> None:
        """Do it where the network is the container's own; its programs rather do without than be lost."""
        container = self._container
        if not loopback.is_own(container.spec.document):
            return
        network = Path(f"/proc/{container.init_pid}/ns/net")
        try:
            await asyncio.to_thread(in_namespace, network, CLONE_NEWNET, loopback.switch_on)
        except OSError as error:
            self._log.warning("loopback.off", error=str(error))

    # -- GPUs ---------------------------------------------------------------------------------------------------------

    @property
    def arena_use(self) -> ArenaUse | None:
        """What of the container is in the arena by a suspend of ours."""
        left = self._gpus.suspended if self._gpus is not None else None
        return left.arena_use if left is not None else None

    def driver_pids(self) -> list[int]:
        """Return the processes that have loaded the CUDA driver, as the host sees them."""
        cgroup = self._container.cgroup
        return [pid for pid in cgroup.processes() if holds_driver(pid)] if cgroup is not None else []

    async def suspend(self, lock_seconds: float = 0) -> tuple[Left, Operation]:
        """Move VRAM into host memory; the processes wait."""
        with self._operating("suspend") as operation:
            left = await self._accelerator().suspend(operation, force=False, lock_seconds=lock_seconds)
            operation.fields = {"vram_bytes": left.vram_bytes, "arena_bytes": left.arena_use.bytes}
            if left.arena_use.reasons:
                operation.fields["arena_reasons"] = left.arena_use.reasons
            return left, operation

    async def unsuspend(self, restore_seconds: float = 0, room_seconds: float = 0) -> tuple[Left, Operation]:
        """Move it back. Raises NothingToResume."""
        with self._operating("resume") as operation:
            left = await self._accelerator().resume(
                operation, restore_seconds=restore_seconds, room_seconds=room_seconds
            )
            return left, operation

    async def suspend_if_on_gpu(self) -> None:
        if self.driver_pids():
            await self.suspend()

    async def unsuspend_if_on_gpu(self) -> None:
        if self.driver_pids():
            from kybernate_shim.checkpoint.gpu import NothingToResume

            try:
                await self.unsuspend()
            except NothingToResume:
                pass  # it was paused before it had any GPU state

    def _accelerator(self) -> CudaAccelerator:
        """Return what knows of GPUs, whose modules are not loaded on a node that has none."""
        if self._gpus is None:
            from kybernate_shim.checkpoint.gpu import CudaAccelerator

            self._gpus = CudaAccelerator(self._container, self._container.note_locked, self._log)
        return self._gpus

    @contextmanager
    def _operating(self, verb: Verb, image: ImageRef = NO_IMAGE) -> Iterator[Operation]:
        """Keep the record of an operation while it runs, note it for `delete`, log what it cost, and audit it."""
        container = self._container
        container.gpu.begin(verb)
        self.current = operation = Operation(verb)
        self._image = image
        container.note(phase=verb)
        outcome = "failed"
        with Undo() as undo:
            undo.callback(lambda: self._end(outcome))
            try:
                yield operation
                outcome = "done"
            except BaseException as error:
                outcome = self._outcome_of(error)
                self._log.error(f"task.{verb}_failed", error=in_words(error), seconds=operation.summary())
                audit(
                    container, verb, decision_of(error), self._image, self._log, error=error, seconds=operation.seconds
                )
                raise
            else:
                self._log.info(
                    f"task.{DONE[verb]}", pid=container.init.pid, seconds=operation.summary(), **operation.fields
                )
                audit(container, verb, "done", self._image, self._log, seconds=operation.seconds)

    def _end(self, outcome: str) -> None:
        self.current = None
        self._container.gpu.end(outcome)
        self._container.note(phase="idle")

    def _outcome_of(self, error: BaseException) -> str:
        """Return what a failure has led to, as the table of GPU states has it."""
        if self._gpus is None:
            return "failed"
        from kybernate_shim.checkpoint.gpu import NothingToResume
        from kybernate_shim.checkpoint.target import NotBack

        if isinstance(error, NothingToResume):
            return "nothing to do"
        if isinstance(error, NotBack):
            return "still away" if self._gpus.suspended is not None else "not back"
        return "failed"
