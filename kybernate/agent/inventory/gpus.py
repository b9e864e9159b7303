"""The node's GPUs in the hub, as the CUDA helper sees them.

What a GPU has free changes without any event, so the helper is asked each second; but only while a client follows GPUs,
since a helper that runs for no client would be waste.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kybernate.agent.inventory.containers import Key
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.gpu.helper_answers import CudaInfo, NodeGpu
from kybernate_shim.gpu.helper_client import cuda_helper
from kybernate_shim.linux.kernel_text import lines_of, text_of

SECONDS = 1.0
WITHOUT_DRIVER_SECONDS = 300.0  # until a node that had no usable driver is asked again
PROC = Path("/proc")
DRIVER = Path("/proc/driver/nvidia/gpus")  # a directory for each GPU, by its PCI address

Users = Mapping[Key, Iterable[str]]


@dataclass(frozen=True)
class Activity:
    """What a container's processes do on GPUs. A rise of `mark` between two looks shows that they have computed.

    `unknown` are the GPUs that they use and of which NVML does not say what processes do there. `works`: NVML's newest
    sample of a GPU shows that they compute there.
    """

    mark: int = 0
    unknown: tuple[str, ...] = ()
    works: bool = False


@dataclass(frozen=True)
class Sight:
    """The GPUs as the driver reports them now, and what each container holds and does there.

    `held` are the bytes of a container's processes, by GPU, and `processes` those that hold any.
    """

    gpus: Sequence[NodeGpu]
    held: Mapping[Key, Mapping[str, int]]
    activities: Mapping[Key, Activity]
    processes: Mapping[Key, frozenset[int]]


async def ask_driver() -> CudaInfo:
    """Return what the CUDA helper says. Raises CudaError."""
    async with cuda_helper() as helper:
        return await helper.info()


class Gpus:
    """Keeps the hub's GPUs. `driver` is the driver's version, "" where there is none; `problem` says why."""

    def __init__(
        self,
        hub: Hub,
        pids: Callable[[], Mapping[Key, int]],
        used: Callable[[Users], None],
        *,
        ask: Callable[[], Awaitable[CudaInfo]] = ask_driver,
        now: Callable[[], float] = time.monotonic,
        proc: Path = PROC,
    ) -> None:
        """`pids` returns the first process of each container; `used` gets the GPUs that each uses."""
        self.driver, self.problem = "", ""
        self._hub, self._pids, self._used = hub, pids, used
        self._ask, self._now, self._proc = ask, now, proc
        self._lock = asyncio.Lock()
        self._next = 0.0
        self._activities: Mapping[Key, Activity] = {}

    async def run(self) -> None:
        """Keep the hub's GPUs up to date while a client follows them, until this is cancelled."""
        while True:
            if self._hub.wanted("gpu"):
                await self.refresh()
            await asyncio.sleep(SECONDS)

    async def refresh(self) -> None:
        """Ask the driver, unless that was done within the last second. Raises no expected error, see `problem`."""
        async with self._lock:
            if self._now() < self._next:
                return
            try:
                info = await self._ask()
            except CudaError as error:
                self._next = self._now() + WITHOUT_DRIVER_SECONDS
                self.problem, info = str(error), CudaInfo("", 0, (), ())
            else:
                self._next, self.problem = self._now() + SECONDS, ""
            self.driver = info.driver_version
            self._publish(info.gpus)

    async def look(self) -> Sight | None:
        """Ask the driver now, however recent the last answer is; None where it does not answer."""
        async with self._lock:
            try:
                info = await self._ask()
            except CudaError:
                return None
            self._next, self.problem, self.driver = self._now() + SECONDS, "", info.driver_version
            owners = self._publish(info.gpus)
        held: dict[Key, dict[str, int]] = {}
        processes: dict[Key, set[int]] = {}
        for gpu in info.gpus:
            for pid, size in gpu.holdings.items():
                if (key := owners.get(pid)) is not None:
                    of_one = held.setdefault(key, {})
                    of_one[gpu.uuid] = of_one.get(gpu.uuid, 0) + size
                    processes.setdefault(key, set()).add(pid)
        return Sight(info.gpus, held, self._activities, {key: frozenset(pids) for key, pids in processes.items()})

    async def activity(self, key: Key) -> Activity:
        """Return what the container's processes have done on GPUs; it is not older than a second."""
        await self.refresh()
        return self._activities.get(key, Activity())

    def _publish(self, gpus: Sequence[NodeGpu]) -> Mapping[int, Key]:
        """Publish GPUs and who uses them; return the containers of processes."""
        addresses = pci_addresses()
        owners = self._owners({pid for gpu in gpus for pid in (*gpu.holdings, *(gpu.computed or ()))})
        messages = [gpu_message(gpu, addresses.get(gpu.uuid, ""), owners) for gpu in gpus]
        there = {message.uuid for message in messages}
        for gone in [gpu for gpu in self._hub.objects("gpu") if gpu.uuid not in there]:
            self._hub.remove(gone)
        for message in messages:
            self._hub.put(message)
        users = users_of(gpus, owners)
        self._activities = activities_of(gpus, owners, users)
        self._used(users)
        return owners

    def _owners(self, pids: Iterable[int]) -> Mapping[int, Key]:
        """Return the containers of processes, by their cgroups."""
        cgroups = {pid: cgroup_of(pid, self._proc) for pid in pids}
        if not cgroups:
            return {}
        containers = {cgroup_of(pid, self._proc): key for key, pid in self._pids().items()}
        found = {pid: container_of(cgroup, containers) for pid, cgroup in cgroups.items()}
        return {pid: key for pid, key in found.items() if key is not None}


def users_of(gpus: Iterable[NodeGpu], owners: Mapping[int, Key]) -> Users:
    """Return the GPUs of each container, by the processes that hold their memory."""
    found: dict[Key, set[str]] = {}
    for gpu in gpus:
        for pid in gpu.holdings.keys() & owners.keys():
            found.setdefault(owners[pid], set()).add(gpu.uuid)
    return {key: sorted(uuids) for key, uuids in found.items()}


def activities_of(gpus: Iterable[NodeGpu], owners: Mapping[int, Key], users: Users) -> Mapping[Key, Activity]:
    """Return what the processes of each container do on GPUs."""
    marks: dict[Key, int] = {}
    working: set[Key] = set()
    for gpu in gpus:
        for pid, mark in (gpu.computed or {}).items():
            if (key := owners.get(pid)) is not None:
                marks[key] = max(mark, marks.get(key, 0))
                if mark >= gpu.sampled:
                    working.add(key)
    blind = {gpu.uuid for gpu in gpus if gpu.computed is None}
    return {
        key: Activity(marks.get(key, 0), tuple(uuid for uuid in users.get(key, ()) if uuid in blind), key in working)
        for key in {*marks, *users}
    }


def shares_of(gpu: NodeGpu, owners: Mapping[int, Key]) -> list[api.Share]:
    """Return what the processes of each container hold of a GPU's memory, the largest first."""
    held: dict[Key, int] = {}
    for pid, size in gpu.holdings.items():
        if size and (key := owners.get(pid)) is not None:
            held[key] = held.get(key, 0) + size
    largest = sorted(held.items(), key=lambda one: (-one[1], one[0]))
    return [api.Share(namespace=namespace, container=id, bytes=size) for (namespace, id), size in largest]


def gpu_message(gpu: NodeGpu, pci_address: str, owners: Mapping[int, Key]) -> api.Gpu:
    """Return the agent's message. What the driver does not report is 0."""
    return api.Gpu(
        uuid=gpu.uuid,
        index=gpu.number or 0,
        model=gpu.name,
        numa_node=gpu.node,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.used_bytes,
        free_bytes=gpu.free_bytes or 0,
        pci_address=pci_address,
        shares=shares_of(gpu, owners),
    )


def pci_addresses(driver: Path = DRIVER) -> dict[str, str]:
    """Return the PCI address of each GPU by its UUID; empty where the driver does not report them."""
    found = {}
    for file in driver.glob("*/information"):
        try:
            fields = dict(line.split(":", 1) for line in lines_of(text_of(file)) if ":" in line)
        except OSError:
            continue
        found[fields.get("GPU UUID", "").strip()] = file.parent.name
    return found


def cgroup_of(pid: int, proc: Path = PROC) -> str:
    """Return the longest path of a process's cgroups, "" where it is gone."""
    try:
        lines = lines_of(text_of(proc / str(pid) / "cgroup"))
    except OSError:
        return ""
    return max((line.split(":", 2)[2] for line in lines if line.count(":") >= 2), key=len, default="")


def container_of(cgroup: str, containers: Mapping[str, Key]) -> Key | None:
    """Return the container in whose cgroup, or below it, a process is; containers may make cgroups of their own."""
    while len(cgroup) > 1:
        if cgroup in containers:
            return containers[cgroup]
        cgroup = cgroup.rpartition("/")[0]
    return None
