"""Asks the node's agent for room on the GPUs of a container, before the container starts.

The agent alone allocates room on a node. Where none runs, the container starts, and gets what the driver allows; one
with a seat waits for the agent if the node's configuration of seats says so.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kybernate_shim.errors import Refused
from kybernate_shim.messages import room_pb2 as wire
from kybernate_shim.oci.annotations import has_seat
from kybernate_shim.oci.gpu_spec import NONE, VISIBLE
from kybernate_shim.oci.spec import Spec
from kybernate_shim.run_directory import IMAGES_SOCKET, SEATS_WAIT
from kybernate_shim.ttrpc import Client, Code, RpcError

SERVICE: Final = "kybernate.room.v1.Room"
CONNECT_SECONDS: Final = 2.0
SECONDS: Final = 60.0
SEAT_SECONDS: Final = 110.0  # clients of containerd give a Start two minutes
AGAIN_SECONDS: Final = 0.2  # between attempts to reach an agent that is away


async def take(spec: Spec, namespace: str, container: str) -> None:
    """Return when a container may take memory on its GPUs; immediately for one without GPUs. Raises Refused."""
    visible = spec.env(VISIBLE)
    seated = has_seat(spec.annotations)
    gpus = [] if visible is None or visible in NONE else visible.split(",")
    if not seated and not gpus:
        return
    seconds = SEAT_SECONDS if seated else SECONDS
    request = wire.TakeRequest(namespace=namespace, container=container, gpus=gpus)
    away = False
    try:
        async with asyncio.timeout(seconds):
            while not await _answered(request, seconds):
                if not seated or not SEATS_WAIT.exists():
                    return  # nothing allocates room
                away = True
                await asyncio.sleep(AGAIN_SECONDS)
                away = not IMAGES_SOCKET.exists()
    except TimeoutError:
        why = "the node's agent does not answer" if away else "the node's agent has found no room on its GPUs"
        raise Refused(f"container {container}: {why} in {seconds:g} s. It was not started") from None


async def _answered(request: wire.TakeRequest, seconds: float) -> bool:
    """Return whether the agent has let the container start; False where none answers. Raises Refused, TimeoutError."""
    if not IMAGES_SOCKET.exists():
        return False
    try:
        agent = await Client.connect(str(IMAGES_SOCKET), timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError):
        return False
    try:
        await agent.call(SERVICE, "Take", request, wire.TakeResponse, timeout=seconds)
    except RpcError as error:
        if error.code == Code.UNIMPLEMENTED:  # an agent of an earlier release
            return True
        if error.code == Code.DEADLINE_EXCEEDED:
            raise TimeoutError from error
        if error.code in (Code.UNAVAILABLE, Code.CANCELED):
            return False  # the agent is ending
        raise Refused(
            f"container {request.container}: the node's agent: {error.message}. It was not started"
        ) from error
    except ConnectionError:
        return False  # the agent has ended
    finally:
        await agent.close()
    return True
