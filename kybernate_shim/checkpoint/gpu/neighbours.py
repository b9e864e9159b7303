"""Other processes on the GPUs of a container that has come back to them.

The driver does not preempt kernels of a process that it has restored: others on that GPU wait for each of them, and
one that lasts about 5 s is ended, with the process (see docs/gpus.md). It is the driver's, and cannot be seen before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from kybernate_shim.gpu.helper_answers import NodeGpu
from kybernate_shim.linux.process import is_nodes_own

OWN = b"kybernate_shim.cuda_worker"  # which has a context on GPUs while the arena is used


def neighbours(node: Iterable[NodeGpu], gpus: Collection[str], pids: Collection[int]) -> list[int]:
    """Return the processes on some GPUs, by UUID, that are not among `pids`; those that NVML names."""
    there = {pid for gpu in node if gpu.uuid in gpus for pid in gpu.holdings}
    return sorted(pid for pid in there - set(pids) if not _is_own(pid))


def _is_own(pid: int) -> bool:
    """Return whether it is a worker of ours; nothing is read of another one's memory, which may keep us waiting."""
    try:
        return is_nodes_own(pid) and OWN in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended, or is another namespace's
        return False
