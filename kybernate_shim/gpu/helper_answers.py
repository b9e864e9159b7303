"""What the node's CUDA helper answers, as the shim sees it: processes, GPUs, and what has moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kybernate_shim.gpu.errors import CudaError
from kybernate_shim.messages import cuda_pb2 as wire
from kybernate_shim.sizes import NO_NODE


class State(Enum):
    """A process as the driver sees it."""

    RUNNING = wire.RUNNING
    LOCKED = wire.LOCKED
    CHECKPOINTED = wire.CHECKPOINTED
    FAILED = wire.FAILED
    UNKNOWN = wire.UNKNOWN


@dataclass(frozen=True)
class CudaProcess:
    """A process that holds CUDA state. `restore_thread` is the driver's thread in it, 0 where it has none.

    `arena_bytes` of its VRAM are neither on a GPU nor in its own memory, but in the node's arena.
    """

    pid: int
    state: State
    restore_thread: int
    arena_bytes: int = 0


@dataclass(frozen=True)
class States:
    """The driver's answers: the processes with CUDA state by pid, and the error of each other one."""

    processes: Mapping[int, CudaProcess]
    unknown: Mapping[int, CudaError]


@dataclass(frozen=True)
class ArenaMoved:
    """What moved to or from the arena, by pid: the bytes, or why nothing of a process moved.

    `spared` of all the bytes needed no copy: the arena had them already, or they are zeros.
    """

    moved: Mapping[int, int] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    spared: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.moved.values())


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of the node. `free_bytes` and `number`, which is its device node's, are None where NVML reports none.

    `holdings` are the bytes that processes hold of its memory, by pid; `node` is the NUMA node that it is near, NO_NODE
    where the kernel does not report it. `computed` is when each process last used it, by pid, in microseconds of NVML's
    clock; None where NVML does not report it. `sampled` is the time of NVML's newest sample by that clock, 0 where
    there was none yet. `links` are paths to other GPUs, by UUID, such as "NV18" or "SYS".
    """

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int | None
    mig: bool
    number: int | None = None
    holdings: Mapping[int, int] = field(default_factory=dict)
    node: int = NO_NODE
    computed: Mapping[int, int] | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    sampled: int = 0

    @property
    def used_bytes(self) -> int:
        """What is not free, used by any process; 0 where NVML does not report it."""
        return 0 if self.free_bytes is None else self.total_bytes - self.free_bytes


@dataclass(frozen=True)
class CudaInfo:
    """The node's driver. `api_version` 13000 is CUDA 13.0; `driver_version` is "" where NVML does not report it."""

    driver_version: str
    api_version: int
    gpus: tuple[NodeGpu, ...]
    missing_calls: tuple[str, ...]


@dataclass(frozen=True)
class RoomComing:
    """The GPU, by its UUID, on which another process gives up room, some at least within so many seconds."""

    gpu: str
    seconds: float
