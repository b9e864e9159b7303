"""A container is frozen and thawed by containerd's Pause and Resume, off its GPUs where its annotation says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kybernate_shim.messages import events_pb2 as events
from kybernate_shim.task.lifecycle import after

if TYPE_CHECKING:
    from kybernate_shim.task.container import Container

PAUSE = "kybernate.io/pause"  # "suspend": a pause takes the container off its GPUs, too


class Pausing:
    """Pause and Resume of one container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    async def pause(self) -> None:
        """Freeze it, off its GPUs where that is wanted; if the freeze fails, bring back what has left them."""
        container = self._container
        container.gpu.require("pause")
        async with container.lock:
            container.init.move("pause")
            suspended_before = container.suspended
            try:
                if self._pause_suspends:
                    await container.operations().suspend_if_on_gpu()
                await container.runtime.pause(container.id, container.cgroup)
            except BaseException as error:
                if container.init.state == "pausing":
                    container.init.move("not paused")
                if container.suspended and not suspended_before:
                    await self._back_after(error)
                raise
            if container.init.state == "pausing":
                container.init.move("paused")
            container.publish("/tasks/paused", events.TaskPaused(container_id=container.id))

    async def _back_after(self, error: BaseException) -> None:
        container = self._container
        try:
            await container.operations().unsuspend_if_on_gpu()
        except Exception as second:  # noqa: BLE001  # the first error is what the caller gets
            error.add_note(f"and it stays suspended: {second}")
            container.log.error("task.resume_failed", error=str(second))

    async def resume(self) -> None:
        container = self._container
        container.gpu.require("unpause")
        async with container.lock:
            after(container.init.state, "resume")
            await container.runtime.resume(container.id, container.cgroup)
            if container.init.state == "paused":
                container.init.move("resume")
            if self._pause_suspends:
                await container.operations().unsuspend_if_on_gpu()
            container.publish("/tasks/resumed", events.TaskResumed(container_id=container.id))

    @property
    def _pause_suspends(self) -> bool:
        container = self._container
        return container.config.pods_choice(container.spec.annotations, PAUSE) == "suspend"
