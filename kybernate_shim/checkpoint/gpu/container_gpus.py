"""The GPUs of one container: what leaving them, coming back and a restore have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from kybernate_shim.checkpoint.gpu.left import Left
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.config import GpuSettings
from kybernate_shim.gpu import gpu_map, helper_client, sequence
from kybernate_shim.gpu.helper_answers import CudaInfo, CudaProcess, NodeGpu, State
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper
from kybernate_shim.gpu.processes import cuda_processes
from kybernate_shim.linux.process import is_nodes_own
from kybernate_shim.logs import Log
from kybernate_shim.oci.gpu_spec import VISIBLE

OWN: Final = b"kybernate_shim.cuda_worker"  # has a context on GPUs while the arena is used


class RecordLocked(Protocol):
    """Records the processes that may be locked, and whether they are `whole`."""

    def __call__(self, pids: Sequence[int], *, whole: bool = True) -> None: ...


class ContainerGpus:
    """The GPUs of one container, and what has left them by `suspend`, until `resume`.

    `record` is called with the pids that may be locked, before they are and when none is, and with whether they are
    whole: where they are not, unlocking them would be wrong.
    """

    def __init__(self, target: Target, record: RecordLocked, log: Log) -> None:
        self.target = target
        self.record = record
        self.log = log
        self.suspended: Left | None = None
        self._warned = False

    @property
    def settings(self) -> GpuSettings:
        """The settings of this moment: those of the target follow the node's file between two operations."""
        return self.target.config.gpu

    @property
    def limits(self) -> sequence.StepSeconds:
        settings = self.settings
        return sequence.StepSeconds(settings.lock, settings.checkpoint, settings.restore, settings.unlock)

    def record_more(self, pids: Sequence[int], *, back: Sequence[int] = ()) -> None:
        """Record `pids` and those that stay suspended, without those that are back."""
        stay = self.suspended.pids if self.suspended is not None else ()
        self.record([*(pid for pid in stay if pid not in back), *pids])

    def note_whole(self, left: Left, whole: bool) -> None:
        if left.pids and not left.gone:
            stay = self.suspended.pids if self.suspended is not None else ()
            self.record([*stay, *left.pids], whole=whole)

    async def in_state(
        self, helper: CudaHelper, *states: State, among: Iterable[int] | None = None
    ) -> list[CudaProcess]:
        assert self.target.cgroup is not None
        pids = self.target.cgroup.processes()
        wanted = pids if among is None else [pid for pid in among if pid in pids]
        return [process for process in await cuda_processes(helper, wanted) if process.state in states]

    def warn_of_neighbours(self, node: Iterable[NodeGpu], gpus: Collection[str]) -> None:
        """Log once that other processes use the GPUs to which the container comes back.

        The driver does not preempt kernels of a process that it has restored: others on that GPU wait for each of them,
        and one that lasts about 5 s is ended, with the process (see docs/gpus.md). It cannot be seen before.
        """
        assert self.target.cgroup is not None
        if not self._warned and (others := _neighbours(node, gpus, self.target.cgroup.processes())):
            self._warned = True
            self.log.warning("gpu.kernels_not_preempted", task=self.target.id, pids=others)

    def usable(self, info: CudaInfo, *, devices_only: bool = False) -> list[str]:
        spec = self.target.spec
        numbers = gpu_map.device_numbers(spec.devices)
        return gpu_map.usable_gpus(numbers, spec.env(VISIBLE), info.gpus, devices_only=devices_only)

    @asynccontextmanager
    async def helper(self) -> AsyncIterator[CudaHelper]:
        async with cuda_helper(helper_client.SOCKET) as helper:
            yield helper


def _neighbours(node: Iterable[NodeGpu], gpus: Collection[str], pids: Collection[int]) -> list[int]:
    """Return the processes on some GPUs, by UUID, that are not among `pids`; those that NVML names."""
    there = {pid for gpu in node if gpu.uuid in gpus for pid in gpu.holdings}
    return sorted(pid for pid in there - set(pids) if not _is_own(pid))


def _is_own(pid: int) -> bool:
    """Return whether it is a worker of ours; nothing is read of another one's memory, which may keep us waiting."""
    try:
        return is_nodes_own(pid) and OWN in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended, or is another namespace's
        return False
