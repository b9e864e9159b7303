"""The calls that begin an operation, declared once for both clients.

`Handle` is what a call answers with: an `Operation`, or an awaitable of one. Common arguments: `namespace` is
containerd's, empty for all; `key` makes a retry the same operation; `deadline` is in seconds for all of it, 0 means as
configured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kybernate.client.requests import duration, options
from kybernate.messages import agent_pb2 as wire

Handle = TypeVar("Handle")


class Verbs(ABC, Generic[Handle]):
    """What can be done to containers and images."""

    @abstractmethod
    def _begin(self, method: str, request: Message) -> Handle:
        """Send the request of "Service/Method", and return the handle of the operation that it began."""

    def checkpoint(
        self,
        container: str,
        path: str = "",
        *,
        namespace: str = "",
        exit: bool = False,
        hold: bool = False,
        hold_timeout: float = 0,
        tcp: str = "",
        rootfs: bool = True,
        volumes: str = "",
        force: bool = False,
        max_freeze: float = 0,
        key: str = "",
        deadline: float = 0,
        labels: Mapping[str, str] | None = None,
    ) -> Handle:
        """Write an image of a container; `path` is its name or a directory, `tcp` is "close" or "established".

        `hold`: the container stays frozen afterwards, for `hold_timeout` seconds at most, 0 means as configured.
        `volumes` are those of its pod that the image has, in the words of the annotation kybernate.io/volumes.
        It may be frozen for `max_freeze` seconds, 0 for as long as its pod or the node says.
        """
        request = wire.CheckpointRequest(
            name=container,
            namespace=namespace,
            path=path,
            exit=exit,
            tcp=tcp,
            without_rootfs=not rootfs,
            volumes=volumes,
            force=force,
            hold=hold,
            hold_timeout=duration(hold_timeout),
            max_freeze_seconds=max_freeze,
            options=options(key, deadline, labels),
        )
        return self._begin("Operations/Checkpoint", request)

    def restore(
        self,
        image: str,
        *,
        name: str = "",
        namespace: str = "",
        container_image: str = "",
        runtime: str = "",
        snapshotter: str = "",
        log_path: str = "",
        force: bool = False,
        from_store: bool = False,
        key: str = "",
        deadline: float = 0,
        labels: Mapping[str, str] | None = None,
    ) -> Handle:
        """Make a container from an image; `name` is its id, by default that of the container in the image.

        One that is not on the node, or `from_store`, arrives while it is restored.
        """
        request = wire.RestoreRequest(
            image=image,
            name=name,
            namespace=namespace,
            container_image=container_image,
            runtime=runtime,
            snapshotter=snapshotter,
            log_path=log_path,
            force=force,
            from_store=from_store,
            options=options(key, deadline, labels),
        )
        return self._begin("Operations/Restore", request)

    def suspend(
        self, container: str, *, namespace: str = "", lock_timeout: float = 0, key: str = "", deadline: float = 0
    ) -> Handle:
        """Move a container's VRAM into host memory; `lock_timeout` is seconds for the driver's lock."""
        request = wire.SuspendRequest(
            name=container,
            namespace=namespace,
            lock_timeout=duration(lock_timeout),
            options=options(key, deadline, None),
        )
        return self._begin("Operations/Suspend", request)

    def resume(
        self,
        container: str,
        *,
        namespace: str = "",
        room_timeout: float = 0,
        restore_timeout: float = 0,
        key: str = "",
        deadline: float = 0,
    ) -> Handle:
        """Move it back; `room_timeout` is how many seconds to wait for room on the GPUs."""
        request = wire.ResumeRequest(
            name=container,
            namespace=namespace,
            room_timeout=duration(room_timeout),
            restore_timeout=duration(restore_timeout),
            options=options(key, deadline, None),
        )
        return self._begin("Operations/Resume", request)

    def swap(
        self,
        leaving: str,
        coming: str,
        *,
        namespace: str = "",
        room_timeout: float = 0,
        key: str = "",
        deadline: float = 0,
    ) -> Handle:
        """Suspend `leaving` and resume `coming` in its place."""
        request = wire.SwapRequest(
            leaving=leaving,
            coming=coming,
            namespace=namespace,
            room_timeout=duration(room_timeout),
            options=options(key, deadline, None),
        )
        return self._begin("Operations/Swap", request)

    def wake(
        self, container: str, *, namespace: str = "", room_timeout: float = 0, key: str = "", deadline: float = 0
    ) -> Handle:
        """Have a container work: resume or restore it, or leave it as it is. `room_timeout` as for `resume`."""
        request = wire.WakeRequest(
            name=container,
            namespace=namespace,
            room_timeout=duration(room_timeout),
            options=options(key, deadline, None),
        )
        return self._begin("Operations/Wake", request)

    def sleep(
        self, container: str, *, namespace: str = "", unless_used: bool = False, key: str = "", deadline: float = 0
    ) -> Handle:
        """Have a container use no GPU: suspend it, or leave it as it is.

        `unless_used`: the operation fails where others have reported requests in flight.
        """
        request = wire.SleepRequest(
            name=container, namespace=namespace, unless_used=unless_used, options=options(key, deadline, None)
        )
        return self._begin("Operations/Sleep", request)

    def park(self, container: str, *, namespace: str = "", key: str = "", deadline: float = 0) -> Handle:
        """Move the VRAM of a suspended container from host memory to the disk, until it is woken or resumed."""
        request = wire.ParkRequest(name=container, namespace=namespace, options=options(key, deadline, None))
        return self._begin("Operations/Park", request)

    def verify_image(self, image: str, *, key: str = "", deadline: float = 0) -> Handle:
        """Compare every byte of an image with its digest."""
        request = wire.VerifyImageRequest(image=image, options=options(key, deadline, None))
        return self._begin("Checkpoints/VerifyImage", request)

    def delete_image(self, image: str, *, force: bool = False, key: str = "", deadline: float = 0) -> Handle:
        """Delete an image; a pinned one only with `force`."""
        request = wire.DeleteImageRequest(image=image, force=force, options=options(key, deadline, None))
        return self._begin("Checkpoints/DeleteImage", request)

    def import_image(
        self, path: str, name: str = "", *, namespace: str = "", key: str = "", deadline: float = 0
    ) -> Handle:
        """Make an archive or a directory on the node one of its images; `namespace` is Kubernetes'."""
        request = wire.ImportImageRequest(
            path=path, name=name, namespace=namespace, options=options(key, deadline, None)
        )
        return self._begin("Checkpoints/ImportImage", request)

    def export_image(self, image: str, path: str, *, key: str = "", deadline: float = 0) -> Handle:
        """Write an image to an archive on the node."""
        request = wire.ExportImageRequest(image=image, path=path, options=options(key, deadline, None))
        return self._begin("Checkpoints/ExportImage", request)

    def copy_image(
        self,
        image: str,
        tier: str,
        *,
        priority: str = "request",
        demote: bool = False,
        key: str = "",
        deadline: float = 0,
    ) -> Handle:
        """Copy an image into the tier "ram", "disk" or "object"; with `demote`, it then leaves the faster ones.

        `priority` is "restore", "request", "prefetch" or "demotion".
        """
        request = wire.CopyImageRequest(
            image=image, tier=tier, priority=priority, demote=demote, options=options(key, deadline, None)
        )
        return self._begin("Checkpoints/CopyImage", request)

    def evict_image(self, image: str, tier: str, *, key: str = "", deadline: float = 0) -> Handle:
        """Remove an image from a tier, where another one has a good copy."""
        request = wire.EvictImageRequest(image=image, tier=tier, options=options(key, deadline, None))
        return self._begin("Checkpoints/EvictImage", request)
