"""What the plugin answers kubelet: a pure function of the node's seats and GPUs.

Kubelet asks while it admits a pod and does not say which. So no answer waits for anything, and what a container has
becomes known afterwards, by its annotations and by PodResources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kybernate.messages import device_plugin_pb2 as wire
from kybernate.node.failure import Refused
from kybernate.seats.groups import Place

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
CONTROL_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
CDI_KIND: Final = "nvidia.com/gpu"


@dataclass(frozen=True)
class NodeGpus:
    """The node's GPUs by index: UUIDs, NUMA nodes (-1: not known), and which are there and work."""

    uuids: Mapping[int, str]
    numa: Mapping[int, int]
    healthy: frozenset[int]


def devices(places: Iterable[Place], gpus: NodeGpus) -> list[wire.Device]:
    """Return the devices of a resource. One is unhealthy if a GPU is; a seat that is taken, or parked, is not."""
    return [
        wire.Device(
            ID=place.name,
            health=HEALTHY if gpus.healthy.issuperset(place.group.gpus) else UNHEALTHY,
            topology=_numa_nodes(place, gpus),
        )
        for place in places
    ]


def _numa_nodes(place: Place, gpus: NodeGpus) -> wire.TopologyInfo | None:
    nodes = sorted({gpus.numa.get(gpu, -1) for gpu in place.group.gpus} - {-1})
    return wire.TopologyInfo(nodes=[wire.NUMANode(ID=node) for node in nodes]) if nodes else None


def preferred(
    places: Mapping[str, Place], available: Collection[str], included: Sequence[str], size: int, taken: Iterable[Place]
) -> list[str]:
    """Return which of the available seats a container should get: `included`, then those of the least loaded GPUs.

    `taken` are the seats that containers have, of all profiles. Unknown names are left out, so that one that kubelet
    still remembers fails nothing.
    """
    load: Counter[int] = Counter(gpu for place in taken for gpu in place.group.gpus)
    found = [name for name in included if name in places]
    left = [places[name] for name in available if name in places and name not in found]
    while left and len(found) < size:
        best = min(left, key=lambda one: _rank(one, load))
        left.remove(best)
        found.append(best.name)
        load.update(best.group.gpus)
    return found


def _rank(place: Place, load: Mapping[int, int]) -> tuple[int, int, tuple[int, ...], int, str]:
    loads = [load.get(gpu, 0) for gpu in place.group.gpus]
    return (max(loads), sum(loads), place.group.gpus, len(place.name), place.name)


def allocation(
    places: Mapping[str, Place], wanted: Sequence[str], gpus: NodeGpus, *, by_cdi: bool, control_nodes: Sequence[str]
) -> wire.ContainerAllocateResponse:
    """Return what a container with one seat gets: environment, annotations, and its GPUs. Raises Refused."""
    if len(wanted) != 1:
        raise Refused(
            f"a container can have one seat, and asks for {len(wanted)} ({', '.join(sorted(wanted))}): "
            "set the resource's limit to 1, or use a profile with more GPUs"
        )
    place = places.get(wanted[0])
    if place is None:
        raise Refused(f"this node has no seat {wanted[0]}: groups or profiles have changed since it was advertised")
    group = place.group
    indices = ",".join(map(str, group.gpus))
    answer = wire.ContainerAllocateResponse(
        envs={
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(group.gpus)))),  # of those that the container has
            "KYB_GPU_INDICES": indices,
            "KYB_GPU_GROUP": group.name,
            "KYB_GPU_SEAT": place.name,
        },
        annotations={
            "kyb.ai/seat": place.name,
            "kyb.ai/group": group.name,
            "kyb.ai/gpus": indices,
            "kyb.ai/profile": place.profile.name,
        },
    )
    if by_cdi:
        answer.cdi_devices.extend(wire.CDIDevice(name=f"{CDI_KIND}={gpus.uuids[gpu]}") for gpu in group.gpus)
    else:
        answer.envs["NVIDIA_VISIBLE_DEVICES"] = "void"  # NVIDIA's runtime adds nothing
        nodes = (*(f"/dev/nvidia{gpu}" for gpu in group.gpus), *control_nodes)
        answer.devices.extend(wire.DeviceSpec(container_path=node, host_path=node, permissions="rw") for node in nodes)
    return answer
