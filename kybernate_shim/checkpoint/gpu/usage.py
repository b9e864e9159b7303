"""What a manifest says of GPU state: which processes hold it, how much, and on which GPUs.

Who holds CUDA state is the driver's answer, and complete. How much of which GPU is NVML's, which names no processes to
a container, another pid namespace or a virtual GPU. Then the growth of a process, when its VRAM moved into its host
memory, is taken as the amount, and the GPUs that its container may use stand in for those that it did use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.checkpoint.image.manifest import GpuMemory, UsedGpu
from kybernate_shim.gpu.helper_answers import CudaInfo
from kybernate_shim.sizes import GRAIN


@dataclass(frozen=True)
class GpuUsage:
    """`processes` are all that hold CUDA state, with their bytes on all GPUs together; pids as the container's."""

    processes: tuple[GpuMemory, ...] = ()
    gpus: tuple[UsedGpu, ...] = ()

    @property
    def vram_bytes(self) -> int:
        return sum(process.bytes for process in self.processes)


def usage_of(
    info: CudaInfo, pids: Sequence[int], grown: Mapping[int, int], usable: Sequence[str], before: GpuUsage
) -> GpuUsage:
    """Return the usage of the processes `pids`, and of those that have left their GPUs `before`.

    `info` is from when they were on their GPUs, `grown` the bytes by which their host memory grew, for those whose VRAM
    has moved there since, `usable` the UUIDs of the GPUs that their container may use.
    """
    known = {pid: sum(gpu.holdings.get(pid, 0) for gpu in info.gpus) for pid in pids}
    inner = {pid: found for pid in pids if (found := inner_pid(pid)) is not None}
    processes = {process.pid: process for process in before.processes}
    for pid, name in inner.items():
        held = known[pid] or _moved(grown.get(pid, 0))
        if held or name not in processes:
            processes[name] = GpuMemory(name, held)
    gpus = {gpu.uuid: gpu for gpu in before.gpus}
    for gpu in info.gpus:
        shares = tuple(GpuMemory(inner[pid], gpu.holdings[pid]) for pid in inner if gpu.holdings.get(pid))
        if shares:
            gpus[gpu.uuid] = _with(gpus.get(gpu.uuid), UsedGpu(gpu.uuid, gpu.name, info.driver_version, shares))
    accounted = {share.pid for gpu in gpus.values() for share in gpu.processes}
    hidden = [processes[name] for pid, name in inner.items() if name not in accounted and _moved(grown.get(pid, GRAIN))]
    for gpu in info.gpus if hidden else ():
        if gpu.uuid in usable:
            shares = tuple(share for share in hidden if share.bytes) if len(usable) == 1 else ()
            gpus[gpu.uuid] = _with(gpus.get(gpu.uuid), UsedGpu(gpu.uuid, gpu.name, info.driver_version, shares))
    return GpuUsage(tuple(processes.values()), tuple(gpus.values()))


def inner_pid(pid: int) -> int | None:
    """Return the pid by which a process knows itself; None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def own_memory(pids: Iterable[int]) -> dict[int, int]:
    """Return the bytes of anonymous memory that each living process has, swapped ones included."""
    found = {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        except OSError:
            continue
        found[pid] = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
    return found


def _moved(grown: int) -> int:
    return grown if grown >= GRAIN else 0


def _with(old: UsedGpu | None, new: UsedGpu) -> UsedGpu:
    return new if old is None else UsedGpu(new.uuid, new.model, new.driver, (*old.processes, *new.processes))
