"""Which container a process belongs to: decided by its cgroup, which a container's processes cannot leave.

A container counts if the process is in the cgroup of the container's first process or below it, and if that cgroup has
the container's id in its name: a first process that has ended, and whose pid another process has got, does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kybernate.agent.access.caller import OwnContainer
from kybernate.agent.access.peers import Peer
from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Denied
from kybernate_shim.linux.cgroup.hierarchies import read_names
from kybernate_shim.linux.credentials import is_below

Cgroups = Mapping[str, str]  # names by controller

NO_OWN_CONTAINER_ADVICE: Final = (
    "the socket is for processes in containers of Kybernate's shims; elsewhere, use the agent's own socket"
)


def container_of(
    peer: Peer, containers: Iterable[Container], read: Callable[[int], Cgroups] = read_names
) -> OwnContainer:
    """Return the container of a process that runs. Raises Denied."""
    try:
        cgroups = read(peer.pid)
    except ProcessLookupError:
        cgroups = {}
    if not peer.alive():
        raise Denied(f"process {peer.pid} has ended", state="nothing was done", advice=NO_OWN_CONTAINER_ADVICE)
    found = [one for one in containers if _holds(one, cgroups, read)]
    if len(found) != 1:
        what = f"the cgroup of {len(found)} containers" if found else "no cgroup of a container of Kybernate's"
        raise Denied(f"process {peer.pid} is in {what}", state="nothing was done", advice=NO_OWN_CONTAINER_ADVICE)
    one = found[0]
    return OwnContainer(one.namespace, one.id, one.pod_namespace, one.pod, one.name)


def _holds(container: Container, cgroups: Cgroups, read: Callable[[int], Cgroups]) -> bool:
    if container.sandbox or not container.pid or not _named(container.id, cgroups.values()):
        return False
    try:
        own = read(container.pid)
    except ProcessLookupError:
        return False
    named = any(container.id in name.rpartition("/")[2] for name in own.values())
    return named and all(name in cgroups and is_below(cgroups[name], own[name]) for name in own)


def _named(id: str, names: Iterable[str]) -> bool:
    return any(id in name for name in names)
