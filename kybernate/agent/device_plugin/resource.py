"""One resource of the plugin: its socket in kubelet's directory, and the service on it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from kybernate.agent.device_plugin.answers import CONTROL_NODES, NodeGpus, allocation, devices, preferred
from kybernate.messages import device_plugin_pb2 as wire
from kybernate.messages import device_plugin_pb2_grpc as services
from kybernate.node.failure import Refused
from kybernate.seats.groups import Place, Profile

VERSION: Final = "v1beta1"
KUBELET: Final = "kubelet.sock"
SOCKETS: Final = "kybernate-"  # how the names of the plugin's sockets begin
CALL_SECONDS: Final = 10.0
OPTIONS: Final = wire.DevicePluginOptions(get_preferred_allocation_available=True)


class Resource(services.DevicePluginServicer):
    """Serves a profile's seats. `taken` returns the seats of all profiles that containers have."""

    def __init__(
        self,
        profile: Profile,
        places: Sequence[Place],
        directory: Path,
        taken: Callable[[], Iterable[Place]],
        *,
        by_cdi: bool,
        log: Any,
    ) -> None:
        self.profile, self.log = profile, log
        self.places = {place.name: place for place in places}
        self.allocated: set[str] = set()  # since the last time that PodResources was read
        self._directory = directory
        self._socket: Path | None = None
        self._followers, self._followed = 0, asyncio.Event()
        self._taken, self._by_cdi = taken, by_cdi
        self._gpus = NodeGpus({}, {}, frozenset())
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def register(self) -> None:
        """Serve on a new socket, and have kubelet call it.

        Kubelet knows a plugin by its socket's name. It refuses one that it still takes for connected, and can end the
        new connection of a name when it notices the end of the old one. So each registration has a name of its own.

        Returns when kubelet follows the list of devices; a registration that succeeds does not say so.
        Raises grpc.aio.AioRpcError where kubelet does not answer, and OSError.
        """
        await self.close()
        socket = self._directory / f"{SOCKETS}{secrets.token_hex(4)}.sock"  # short: a path has 107 bytes
        self._socket, self._server = socket, grpc.aio.server()
        services.add_DevicePluginServicer_to_server(self, self._server)
        try:
            self._server.add_insecure_port(f"unix://{socket}")
        except RuntimeError as error:  # as of a directory that cannot be written
            raise OSError(f"{socket} cannot be listened on: {error}") from error
        await self._server.start()
        socket.chmod(0o600)
        async with grpc.aio.insecure_channel(f"unix://{self._directory / KUBELET}") as channel:
            request = wire.RegisterRequest(
                version=VERSION, endpoint=socket.name, resource_name=self.profile.resource, options=OPTIONS
            )
            await services.RegistrationStub(channel).Register(request, timeout=CALL_SECONDS)
        try:
            await asyncio.wait_for(self._followed.wait(), CALL_SECONDS)
        except TimeoutError:
            raise TimeoutError(
                f"kubelet accepted it, and has not asked for its devices for {CALL_SECONDS:g} s"
            ) from None

    @property
    def is_followed(self) -> bool:
        """Whether kubelet follows the list of devices, on a socket that is there: it removes all when it starts."""
        return self._followed.is_set() and self._socket is not None and self._socket.exists()

    async def close(self) -> None:
        """Stop serving: kubelet then advertises none of its seats. Containers that run are not touched."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def show(self, gpus: NodeGpus) -> None:
        """Let kubelet have the devices as they are now, if that differs from what it has."""
        if gpus != self._gpus:
            self._gpus = gpus
            self._changed.set()
            self._changed = asyncio.Event()

    # ---- v1beta1.DevicePlugin

    async def GetDevicePluginOptions(self, request: wire.Empty, context: Any) -> wire.DevicePluginOptions:
        return OPTIONS

    async def ListAndWatch(self, request: wire.Empty, context: Any) -> AsyncIterator[wire.ListAndWatchResponse]:
        self._followers += 1
        self._followed.set()
        try:
            while True:
                changed = self._changed
                yield wire.ListAndWatchResponse(devices=devices(self.places.values(), self._gpus))
                await changed.wait()
        finally:
            self._followers -= 1
            if not self._followers:
                self._followed.clear()

    async def GetPreferredAllocation(
        self, request: wire.PreferredAllocationRequest, context: Any
    ) -> wire.PreferredAllocationResponse:
        answers = []
        for one in request.container_requests:
            free = set(one.available_deviceIDs)
            taken = [place for place in self._taken() if place.name not in free]
            names = preferred(
                self.places, one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size, taken
            )
            answers.append(wire.ContainerPreferredAllocationResponse(deviceIDs=names))
        return wire.PreferredAllocationResponse(container_responses=answers)

    async def Allocate(self, request: wire.AllocateRequest, context: Any) -> wire.AllocateResponse:
        nodes = [node for node in CONTROL_NODES if Path(node).exists()]
        answers = []
        try:
            for one in request.container_requests:
                answers.append(
                    allocation(self.places, one.devices_ids, self._gpus, by_cdi=self._by_cdi, control_nodes=nodes)
                )
        except Refused as error:
            self.log.warning("seat.refused", resource=self.profile.resource, error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        names = [name for one in request.container_requests for name in one.devices_ids]
        self.allocated.update(names)
        self.log.info("seat.allocated", resource=self.profile.resource, seats=names)
        return wire.AllocateResponse(container_responses=answers)

    async def PreStartContainer(
        self, request: wire.PreStartContainerRequest, context: Any
    ) -> wire.PreStartContainerResponse:
        return wire.PreStartContainerResponse()
