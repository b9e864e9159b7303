"""kubelet's side of device plugins, by the rules of its device manager, for tests without a cluster.

It removes all sockets of its directory when it starts, calls back a plugin that registers, refuses one whose socket's
name it still takes for connected, takes each list of devices as the complete one, chooses devices as its manager does,
and remembers what containers have.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from kybernate.messages import device_plugin_pb2 as wire
from kybernate.messages import device_plugin_pb2_grpc as services
from kybernate.messages import pod_resources_pb2 as resources
from kybernate.messages import pod_resources_pb2_grpc as resources_services


class AdmissionRefused(Exception):
    """A pod fails with UnexpectedAdmissionError, and this message."""


class Kubelet(services.RegistrationServicer, resources_services.PodResourcesListerServicer):
    """`devices` are the healthy ones of each resource, `unhealthy` the others; `containers` has what each was given."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.devices: dict[str, set[str]] = {}
        self.unhealthy: dict[str, set[str]] = {}
        self.containers: dict[str, tuple[str, list[str]]] = {}
        self.registrations: list[str] = []
        self.changed = asyncio.Condition()
        self._endpoints: dict[str, Path] = {}
        self._follows: dict[Path, asyncio.Task[None]] = {}

    async def start(self) -> None:
        for path in self.directory.glob("*.sock"):
            path.unlink()
        self.devices, self.unhealthy, self._endpoints = {}, {}, {}
        self._server = grpc.aio.server()
        services.add_RegistrationServicer_to_server(self, self._server)
        resources_services.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix://{self.directory}/kubelet.sock")
        await self._server.start()

    async def stop(self) -> None:
        await self.let_go()
        await self._server.stop(0)
        with suppress(FileNotFoundError):
            (self.directory / "kubelet.sock").unlink()

    async def let_go(self) -> None:
        """End the connections to all plugins, whose sockets stay."""
        follows = list(self._follows.values())
        for one in follows:
            one.cancel()
        await asyncio.gather(*follows, return_exceptions=True)

    async def has(self, resource: str, count: int) -> None:
        """Wait until so many healthy devices of a resource are known."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: len(self.devices.get(resource, ())) == count), 20)

    async def admit(self, container: str, resource: str, count: int = 1) -> wire.ContainerAllocateResponse:
        """Give devices to a container that starts, also again. Raises AdmissionRefused."""
        if resource not in self.devices:
            raise AdmissionRefused(f"cannot allocate unregistered device {resource}")
        if container in self.containers:
            _, chosen = self.containers[container]
            if not self.devices[resource].issuperset(chosen):
                raise AdmissionRefused("previously allocated devices are no longer healthy")
        else:
            chosen = await self._choose(resource, count)
        async with grpc.aio.insecure_channel(f"unix://{self._endpoints[resource]}") as channel:
            request = wire.AllocateRequest(container_requests=[wire.ContainerAllocateRequest(devices_ids=chosen)])
            try:
                answer = await services.DevicePluginStub(channel).Allocate(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                raise AdmissionRefused(error.details()) from error
        self.containers[container] = (resource, chosen)
        return answer.container_responses[0]

    async def _choose(self, resource: str, count: int) -> list[str]:
        used = {name for of, names in self.containers.values() if of == resource for name in names}
        free = self.devices[resource] - used
        if len(free) < count:
            raise AdmissionRefused(f"requested number of devices unavailable for {resource}")
        one = wire.ContainerPreferredAllocationRequest(available_deviceIDs=sorted(free), allocation_size=count)
        async with grpc.aio.insecure_channel(f"unix://{self._endpoints[resource]}") as channel:
            stub = services.DevicePluginStub(channel)
            answer = await stub.GetPreferredAllocation(
                wire.PreferredAllocationRequest(container_requests=[one]), timeout=10
            )
        wanted = [name for name in answer.container_responses[0].deviceIDs if name in free]
        return (wanted + sorted(free - set(wanted)))[:count]

    # ---- v1beta1.Registration and v1.PodResourcesLister

    async def Register(self, request: wire.RegisterRequest, context: Any) -> wire.Empty:  # noqa: N802  # gRPC's name
        assert request.version == "v1beta1"
        endpoint = self.directory / request.endpoint
        assert endpoint.exists(), "a plugin serves before it registers"
        if endpoint in self._follows:
            await context.abort(grpc.StatusCode.UNKNOWN, f"device plugin already connected: {endpoint}")
        self.registrations.append(request.resource_name)
        self._endpoints[request.resource_name] = endpoint
        follow = asyncio.create_task(self._follow(request.resource_name, endpoint))
        self._follows[endpoint] = follow
        follow.add_done_callback(lambda _: self._follows.pop(endpoint))
        return wire.Empty()

    async def List(  # noqa: N802  # gRPC's name
        self, request: resources.ListPodResourcesRequest, context: Any
    ) -> resources.ListPodResourcesResponse:
        pods = [
            resources.PodResources(
                name=name,
                namespace="default",
                containers=[
                    resources.ContainerResources(
                        name="main", devices=[resources.ContainerDevices(resource_name=of, device_ids=names)]
                    )
                ],
            )
            for name, (of, names) in self.containers.items()
        ]
        return resources.ListPodResourcesResponse(pod_resources=pods)

    async def _follow(self, resource: str, endpoint: Path) -> None:
        async with grpc.aio.insecure_channel(f"unix://{endpoint}") as channel:
            stub = services.DevicePluginStub(channel)
            options = await stub.GetDevicePluginOptions(wire.Empty(), timeout=10)
            assert options.get_preferred_allocation_available
            with suppress(grpc.aio.AioRpcError):
                async for answer in stub.ListAndWatch(wire.Empty()):
                    await self._take(resource, answer.devices)
            if self._endpoints.get(resource) == endpoint and not endpoint.exists():
                await self._take(resource, [])

    async def _take(self, resource: str, devices: Any) -> None:
        assert all(len(one.ID) <= 63 for one in devices)
        async with self.changed:
            self.devices[resource] = {one.ID for one in devices if one.health == "Healthy"}
            self.unhealthy[resource] = {one.ID for one in devices if one.health == "Unhealthy"}
            self.changed.notify_all()
