"""Asks the node's agent for room on the GPUs of a container, before the container starts.

Room has one owner on a node, the agent. Where none runs, the container starts, and takes what the driver gives it.
"""

from __future__ import annotations

from typing import Final

from kybernate_shim.errors import Refused
from kybernate_shim.messages import room_pb2 as wire
from kybernate_shim.oci.gpu_spec import NONE, VISIBLE
from kybernate_shim.oci.spec import Spec
from kybernate_shim.run_directory import IMAGES_SOCKET
from kybernate_shim.ttrpc import Client, Code, RpcError

SERVICE: Final = "kybernate.room.v1.Room"
CONNECT_SECONDS: Final = 2.0
SECONDS: Final = 60.0  # clients of containerd give a Start two minutes


async def take(spec: Spec, namespace: str, container: str) -> None:
    """Return when a container may take memory on its GPUs; immediately for one without GPUs. Raises Refused."""
    visible = spec.env(VISIBLE)
    if visible is None or visible in NONE or not IMAGES_SOCKET.exists():
        return
    try:
        agent = await Client.connect(str(IMAGES_SOCKET), timeout=CONNECT_SECONDS)
    except OSError:
        return
    request = wire.TakeRequest(namespace=namespace, container=container, gpus=visible.split(","))
    try:
        await agent.call(SERVICE, "Take", request, wire.TakeResponse, timeout=SECONDS)
    except RpcError as error:
        if error.code == Code.UNIMPLEMENTED:  # an agent of an earlier release
            return
        if error.code == Code.DEADLINE_EXCEEDED:
            raise _late(container) from error
        raise Refused(f"container {container}: the node's agent: {error.message}. It was not started") from error
    except TimeoutError:
        raise _late(container) from None
    except ConnectionError:
        return  # the agent has ended: room has no owner
    finally:
        await agent.close()


def _late(container: str) -> Refused:
    return Refused(
        f"container {container}: the node's agent has found no room on its GPUs in {SECONDS:g} s. It was not started"
    )
