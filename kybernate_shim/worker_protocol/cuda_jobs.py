"""The jobs of a CUDA worker: each runs in its own thread, so that ranks that talk to each other are locked together.

A call that hangs cannot be cancelled: its worker is killed. A refusal of the driver is an answer, not a failure, since
callers decide by it.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import TypeVar

import msgspec

from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.sizes import NO_NODE
from kybernate_shim.worker_protocol.errors import ErrorTypes
from kybernate_shim.worker_protocol.messages import Form, Job, Message

PROGRAM = "kybernate_shim.cuda_worker.worker"

A = TypeVar("A")


class DriverUnusable(Exception):
    """libcuda cannot be loaded or does not initialize; the message says which of the two."""


ERRORS = ErrorTypes(DriverUnusable)


class DriverState(IntEnum):
    """A process as the driver sees it. Source: CUDA Driver API, CUprocessState."""

    RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)


class DriverAnswer(msgspec.Struct, frozen=True):
    """What the driver answers for one process: `code` 0 is success. `seconds` are those of the call."""

    code: int = 0
    name: str = ""
    text: str = ""
    seconds: float = 0.0


class StateAnswer(DriverAnswer, frozen=True):
    """Also the state, as the driver's number, and the restore thread, 0 where it names none."""

    state: int = -1
    thread: int = 0


class MoveAnswer(msgspec.Struct, frozen=True):
    """What the arena's worker has done, in bytes, or why it has not.

    `clean_bytes` of the `bytes` were in the arena already, `zero_bytes` are zeros, `prefetched_bytes` were on the GPU
    already; `left_bytes` are left to the driver. `remark` says why more was copied than necessary. `descriptors` of
    process `worker` lead to memory that is to be copied: pairs of a block's index and a descriptor.
    """

    refusal: ArenaRefusal | None = None
    text: str = ""
    seconds: float = 0.0
    bytes: int = 0
    clean_bytes: int = 0
    zero_bytes: int = 0
    prefetched_bytes: int = 0
    left_bytes: int = 0
    remark: str = ""
    worker: int = 0
    descriptors: tuple[tuple[int, int], ...] = ()


class NvmlMemory(msgspec.Struct, frozen=True):
    """What NVML reports of a GPU. `mig`: it is split into instances. `number` is its device node's.

    `holdings` are the bytes by pid, as the helper's pid namespace counts them. `computed` is the time of the last of
    NVML's samples in which a process used the GPU, by pid, in microseconds of NVML's clock; None where NVML has none.
    `sampled` is the time of the newest sample of all, 0 where there was none yet.
    """

    free_bytes: int
    mig: bool
    number: int
    holdings: dict[int, int]
    computed: dict[int, int] | None = None
    sampled: int = 0


class DriverGpu(msgspec.Struct, frozen=True):
    """A GPU by its UUID, "GPU-…". `memory` is None where NVML does not know it, `numa_node` NO_NODE where none is.

    `links` are the paths to the other GPUs, by UUID, as `nvidia-smi topo -m` names them; those that NVML reports.
    """

    uuid: str
    name: str
    total_bytes: int
    numa_node: int = NO_NODE
    memory: NvmlMemory | None = None
    links: dict[str, str] = field(default_factory=dict)


class DriverInfo(msgspec.Struct, frozen=True):
    """The driver: 13000 is CUDA 13.0; `driver_version` is "" where NVML does not report it."""

    api_version: int
    driver_version: str = ""
    gpus: list[DriverGpu] = field(default_factory=list)
    missing_calls: list[str] = field(default_factory=list)


class Ready(Job[None], frozen=True):
    """Answered when the driver is initialized. Raises DriverUnusable."""


class Ping(Job[None], frozen=True):
    """Answered whatever the threads of other jobs do."""


class Describe(Job[DriverInfo], frozen=True):
    """Describe the driver and the GPUs."""


class ReadState(Job[StateAnswer], frozen=True):
    """Ask for a process's state."""

    pid: int


class Lock(Job[DriverAnswer], frozen=True):
    """Lock a process; when its work does not drain in time, the driver refuses and it keeps running."""

    pid: int
    timeout_ms: int


class Checkpoint(Job[DriverAnswer], frozen=True):
    """Move the VRAM of a locked process into its own memory."""

    pid: int


class Restore(Job[DriverAnswer], frozen=True):
    """Move it back; `pairs` are (old, new) UUIDs of all GPUs that the process could open, or none."""

    pid: int
    pairs: tuple[tuple[str, str], ...] = ()


class Unlock(Job[DriverAnswer], frozen=True):
    """Let a locked process continue."""

    pid: int


class ArenaJob(Job[MoveAnswer], frozen=True):
    """The base of what only the arena's worker does. A job ends by itself when its `seconds` are over."""

    pid: int
    seconds: float


class Warm(ArenaJob, frozen=True):
    """Make contexts and pin memory for a process that runs."""


class Expect(ArenaJob, frozen=True):
    """Prepare to reload what `pid` has claimed into processes that are not restored yet, on the GPUs `gpus`."""

    gpus: tuple[str, ...]


class Offload(ArenaJob, frozen=True):
    """Prepare all blocks of a stopped process for the copy into the arena, where there is room for them."""


class MemoryReleased(Message, frozen=True):
    """The process has released all that `Copy` copies: its threads may resume as soon as it is locked."""


class Copied(Message, frozen=True):
    """The arena has the first `blocks` of those in the answer to `Offload`."""

    blocks: int


class Copy(ArenaJob, frozen=True):
    """Copy what `Offload` has prepared, and have the process release it, before the copy if `early`.

    Sends MemoryReleased and Copied.
    """

    early: bool


class Finish(ArenaJob, frozen=True):
    """Copy what a worker that died in a `Copy` has not copied, from descriptors of process `keeper`."""

    keeper: int
    descriptors: tuple[tuple[int, int], ...]


class Prefetch(ArenaJob, frozen=True):
    """Begin to copy the bytes of a process to a GPU, which keeps `free_bytes` free.

    `room_comes`: another process is giving up room there, which is waited for.
    """

    gpu: str
    free_bytes: int
    room_comes: bool = False


class Drop(ArenaJob, frozen=True):
    """Forget what was prefetched."""


class Settle(ArenaJob, frozen=True):
    """Bring all bytes of a stopped process back to VRAM; `hashing` spares copies later.

    Processes that are `leaving` need the link to their GPUs, too. With `room_seconds`, one of them gives up room on
    `room_gpu` (a UUID), which is the process's only GPU: its memory is made block by block, as room becomes free within
    this time.
    """

    hashing: bool = True
    leaving: tuple[int, ...] = ()
    room_gpu: str = ""
    room_seconds: float = 0.0


DriverJob = ReadState | Lock | Checkpoint | Restore | Unlock
CopyEvent = MemoryReleased | Copied
MoveJob = Warm | Expect | Offload | Copy | Finish | Prefetch | Drop | Settle
CudaJob = Ready | Ping | Describe | DriverJob | MoveJob
JOBS: Form[CudaJob] = Form(CudaJob, "job of a CUDA worker")
COPY_EVENTS: Form[CopyEvent] = Form(CopyEvent, "event of a copy")
