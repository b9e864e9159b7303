"""The state of a frozen container becomes an image: what CRIU dumps, what it does not, and the manifest.

Where CRIU itself ends the container, all of that is written before it does: nothing may fail afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from kybernate_shim.checkpoint import script
from kybernate_shim.checkpoint.dump_manifest import Chosen, add_own_files, finish
from kybernate_shim.checkpoint.dump_plan import (
    DumpPlan,
    memory_bytes,
)
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.freeze_limit import Standstill
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import ImageVolume
from kybernate_shim.checkpoint.image.plaintext import encrypted
from kybernate_shim.checkpoint.memory_first import write_out
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.restorable import make_restorable
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.checkpoint.rootfs.diff import write_diff
from kybernate_shim.checkpoint.rootfs.overlay import find_overlay
from kybernate_shim.checkpoint.target import Detached, Target
from kybernate_shim.checkpoint.volumes.save import save
from kybernate_shim.errors import Failed
from kybernate_shim.linux.threads import as_long_as_wanted, to_the_end
from kybernate_shim.oci.commands import Criu
from kybernate_shim.oci.runtime import RuntimeFailed


@dataclass
class Course:
    """What has come of a dump. `gone`: CRIU has ended the container; `lost`: what failed although there is an image."""

    gone: bool = False
    lost: Failed | None = None


@dataclass
class FrozenState:
    """The state of a frozen container, and how it becomes an image."""

    target: Target
    request: DumpRequest
    operation: Operation
    plan: DumpPlan
    chosen: Chosen
    digester: Digester
    detached: Detached | None
    still: Standstill

    async def complete(self) -> tuple[ImageVolume, ...]:
        """Add what CRIU does not dump to what it has dumped, and make the proof. Raises Refused.

        Return which volumes of its pod the image has.
        """
        target, request, operation = self.target, self.request, self.operation
        if request.rootfs_diff:
            with operation.step("rootfs") as step:
                stop = threading.Event()
                step.bytes = await as_long_as_wanted(
                    partial(_write_rootfs_diff, target, request.image, stop.is_set), stop.set
                )
        volumes: tuple[ImageVolume, ...] = ()
        if self.plan.volumes.volumes:
            with operation.step("volumes") as step:
                stop = threading.Event()
                work = partial(save, self.plan.volumes, request.image, stopped=stop.is_set)
                volumes = await as_long_as_wanted(work, stop.set)
                step.bytes = sum(volume.bytes for volume in volumes)
        with operation.step("proof"):
            await as_long_as_wanted(partial(make_restorable, target, request, [volume.name for volume in volumes]))
        if self.detached is not None:
            await self.detached.complete()
        return volumes

    async def finish(self, volumes: tuple[ImageVolume, ...]) -> Dumped:
        """Bring the files to where they stay, encrypted where the node wants that, and write the manifest."""
        request, operation = self.request, self.operation
        await to_the_end(partial(add_own_files, self.target, request))
        sealed = await encrypted(request, self.plan.manifest.id, self.target.config, operation)
        await write_out(request, operation)
        with operation.step("manifest"):
            work = partial(
                finish, request, operation, self.plan, volumes, self.chosen, self.detached, self.digester, sealed,
                self.still.milliseconds,
            )  # fmt: skip
            return await to_the_end(work, self.digester.stop)


async def write_state(state: FrozenState) -> tuple[ImageVolume, ...]:
    """Write what has to be read while the container is frozen, and show that it can be restored.

    Return which volumes of its pod the image has.
    """
    with state.digester.following(state.request.image):
        # Cancelled, its connections would stay in repair mode, and blocked by CRIU's rules.
        await (state.operation.unhurried(_run_criu(state)) if state.request.tcp == "established" else _run_criu(state))
    return await state.complete()


async def write_before_the_kill(state: FrozenState, course: Course) -> Dumped:
    """Write the whole image, its manifest too, before CRIU ends the container: nothing may fail after that."""
    operation = state.operation
    operation.stoppable = "by a kill"  # from when on the container is gone, CRIU alone knows
    operation.stop_clock()
    state.still.stop_clock()
    script.arm(state.plan.configuration)
    with ExitStack() as following:
        following.enter_context(state.digester.following(state.request.image))
        answering = _Answering(state, following)
        await operation.unhurried(answering.run())
    operation.commit()  # the container is gone: its image must not be lost, too
    course.gone = True
    if answering.dumped is not None:
        return answering.dumped
    volumes: tuple[ImageVolume, ...] = ()
    try:
        volumes = await state.complete()  # of a CRIU that executes no script
    except Exception as error:  # noqa: BLE001  # whatever it is, what CRIU has written is all that there is
        course.lost = Failed(
            f"CRIU has ended container {state.target.id} without waiting for its image, which could not be completed:"
            f" {error}. It stays at {state.request.destination or state.request.image}, without the proof that it can"
            " be restored: keep it until a restore of it has succeeded"
        )
    return await state.finish(volumes)


@dataclass
class _Answering:
    """Finishes an image while a CRIU that kills waits for that. `dumped` is the image, once it is.

    `following` digests what CRIU writes, until that is complete.
    """

    state: FrozenState
    following: ExitStack
    dumped: Dumped | None = None
    failure: Exception | None = None

    async def run(self) -> None:
        """Run CRIU. Raises what kept the image from being finished; the container continues then."""
        try:
            async with script.asked(self.answer) as environment:
                await _run_criu(self.state, environment)
        except RuntimeFailed:
            if self.failure is not None:
                raise self.failure from None
            raise

    async def answer(self, question: str) -> bytes:
        """Return the answer to the script."""
        try:
            await to_the_end(self.following.close)
            dumped = await self.state.finish(await self.state.complete())
            self.state.still.require()
            self.dumped = dumped
        except Exception as error:  # noqa: BLE001  # raised again by `run`, when CRIU has released the processes
            self.failure = error
            return script.REFUSE
        return script.PASS


async def _run_criu(state: FrozenState, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    target, request, operation = state.target, state.request, state.operation
    words = Criu(
        request.image,
        request.work,
        tcp_established=request.tcp == "established",
        ext_unix_sk=request.options.external_unix_sockets,
        shell_job=request.options.terminal or target.spec.terminal,
        file_locks=True,
        extra=_mode(request.options.cgroups_mode),
    )
    given = {**target.runtime.env, **state.plan.configuration.environment, **environment}
    runtime = replace(target.runtime, env=given)
    with operation.step("dump", total_bytes=memory_bytes(target)) as step, _progress(operation, request.image):
        await runtime.checkpoint(
            target.id, words, leave_running=not criu_kills(request), empty_ns=request.options.empty_namespaces
        )
        step.bytes = _size_of(request.image)


def criu_kills(request: DumpRequest) -> bool:
    """Return whether CRIU itself must end the container.

    Connections that are to continue elsewhere must vanish without notice to their peers; only CRIU can end them so.
    """
    return request.exit and request.tcp == "established"


def _write_rootfs_diff(target: Target, image: Path, stopped: Callable[[], bool]) -> int:
    overlay = find_overlay(target.bundle.rootfs)
    hidden = [str(mount.get("destination") or "") for mount in target.spec.mounts]
    return write_diff(overlay, image / ROOTFS_DIFF, exclude=hidden, stopped=stopped).bytes


@contextmanager
def _progress(operation: Operation, image: Path):  # type: ignore[no-untyped-def]  # a generator of nothing
    """Let the operation report how much is written; it is looked up only on request."""
    operation.measure = partial(_size_of, image)
    try:
        yield
    finally:
        operation.measure = None


def _size_of(directory: Path) -> int:
    """Return what CRIU has written, VRAM's files aside."""
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name.endswith(".img"))
    except FileNotFoundError:
        return 0


def _mode(cgroups_mode: str) -> tuple[str, ...]:
    return (f"--manage-cgroups-mode={cgroups_mode}",) if cgroups_mode else ()
