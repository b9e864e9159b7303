"""The plugin: all resources, registered whenever kubelet starts, with the GPUs' health, and who has which seat."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc

from kybernate.agent.device_plugin.answers import NodeGpus
from kybernate.agent.device_plugin.resource import KUBELET, SOCKETS, Resource
from kybernate.messages import pod_resources_pb2 as wire
from kybernate.messages import pod_resources_pb2_grpc as services
from kybernate.seats.groups import Place
from kybernate_shim.linux.inotify import inotify_watch

IN_CREATE, IN_DELETE = 0x100, 0x200
LOOK_SECONDS: Final = 10.0  # between two looks at GPUs and pods
AGAIN_SECONDS: Final = 1.0  # until kubelet is called again, where it did not answer
CALL_SECONDS: Final = 5.0
Holders = Mapping[str, str]  # NAMESPACE/POD/CONTAINER by the name of its seat


class DevicePlugin:
    """Keeps `resources` registered. `look` returns the GPUs as they are now, None where the driver does not answer."""

    def __init__(
        self,
        resources: list[Resource],
        directory: Path,
        pod_resources: Path,
        look: Callable[[], Awaitable[NodeGpus | None]],
        log: Any,
    ) -> None:
        self.resources = resources
        self.holders: Holders = {}
        self._directory, self._pod_resources = directory, pod_resources
        self._look, self._log = look, log

    async def run(self) -> None:
        """Keep each resource registered until this is cancelled: with each start of kubelet, and where it has let go.

        A registration that succeeds is not yet a resource that pods can have: that it is followed is looked at, too.
        """
        await asyncio.to_thread(self._prepare)
        async with _changes(self._directory) as changes:
            while True:
                changes.clear()
                kept = all([await self._keep(resource) for resource in self.resources])
                with suppress(TimeoutError):
                    await asyncio.wait_for(changes.wait() if kept else asyncio.sleep(AGAIN_SECONDS), LOOK_SECONDS)

    async def _keep(self, resource: Resource) -> bool:
        """Register a resource that kubelet does not follow. Return False where that has to be tried again."""
        if resource.is_followed or not (self._directory / KUBELET).exists():
            return True
        try:
            await resource.register()
        except (grpc.aio.AioRpcError, OSError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self._log.warning("seats.not_registered", resource=resource.profile.resource, error=reason)
            return False
        self._log.info("seats.registered", resource=resource.profile.resource, seats=len(resource.places))
        return True

    async def watch(self) -> None:
        """Follow the health of GPUs and which pods have which seats, until this is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(LOOK_SECONDS)

    async def refresh(self) -> None:
        """Look at GPUs and pods once. A driver or a kubelet that does not answer leaves what is known."""
        gpus = await self._look()
        if gpus is not None:
            for resource in self.resources:
                resource.show(gpus)
        try:
            found = await self._ask_kubelet()
        except grpc.aio.AioRpcError:
            return
        for resource in self.resources:
            resource.allocated.clear()
        self.holders = found

    def taken(self) -> Iterator[Place]:
        """Yield the seats that containers have, as far as PodResources and allocations since then say."""
        for resource in self.resources:
            for name in resource.allocated | (self.holders.keys() & resource.places.keys()):
                if name in resource.places:
                    yield resource.places[name]

    async def close(self) -> None:
        for resource in self.resources:
            await resource.close()

    def _prepare(self) -> None:
        """Have kubelet's directory, before its first start, without the sockets of a plugin that was killed."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for socket in self._directory.glob(f"{SOCKETS}*.sock"):
            socket.unlink(missing_ok=True)

    async def _ask_kubelet(self) -> Holders:
        async with grpc.aio.insecure_channel(f"unix://{self._pod_resources}") as channel:
            stub = services.PodResourcesListerStub(channel)
            answer = await stub.List(wire.ListPodResourcesRequest(), timeout=CALL_SECONDS)
        return holders_of(answer, {one.profile.resource for one in self.resources})


def holders_of(answer: wire.ListPodResourcesResponse, resources: set[str]) -> Holders:
    """Return which container has which seat."""
    return {
        name: f"{pod.namespace}/{pod.name}/{container.name}"
        for pod in answer.pod_resources
        for container in pod.containers
        for one in container.devices
        if one.resource_name in resources
        for name in one.device_ids
    }


@asynccontextmanager
async def _changes(directory: Path) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set when a file in the directory comes or leaves."""
    changed, loop = asyncio.Event(), asyncio.get_running_loop()
    fd = inotify_watch(str(directory), IN_CREATE | IN_DELETE)

    def read() -> None:
        os.read(fd, 4096)
        changed.set()

    loop.add_reader(fd, read)
    try:
        yield changed
    finally:
        loop.remove_reader(fd)
        os.close(fd)
