"""The driver's checkpoint calls, through `cuda.bindings.driver`. Only the CUDA helper's workers import this module.

A call that the driver refuses is a result here, not an exception: callers decide by it.
Source: docs.nvidia.com "CUDA Driver API", CUDA checkpointing.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kybernate_shim.cuda_worker.bindings import driver as cuda
from kybernate_shim.cuda_worker.nvml import Nvml, Uses
from kybernate_shim.linux.numa import node_of_device
from kybernate_shim.sizes import NO_NODE
from kybernate_shim.worker_protocol.cuda_jobs import (
    Checkpoint,
    DriverAnswer,
    DriverGpu,
    DriverInfo,
    DriverUnusable,
    Lock,
    NvmlMemory,
    ReadState,
    Restore,
    StateAnswer,
    Unlock,
)

API_VERSION = 12080  # CUDA 12.8, the first with these calls
BUS_ID_BYTES = 32
PATHS_SECONDS = 60.0  # for which paths between GPUs are cached
CALLS = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)


def initialize() -> None:
    """Load libcuda and initialize it, without a context, so that none of a GPU's memory is taken.

    Raises DriverUnusable.
    """
    try:
        (result,) = cuda.cuInit(0)
    except Exception as error:  # the loader raises its own types, which differ by version
        raise DriverUnusable(f"the CUDA driver cannot be loaded: {_first_line(error)}") from error
    if result:
        answer = _answer(result)
        raise DriverUnusable(f"the CUDA driver does not initialize: {answer.name} ({answer.text})")


def missing_calls() -> list[str]:
    """Return the names of the checkpoint calls that this driver does not have."""
    return [name for name in CALLS if cuda.cuGetProcAddress(name.encode(), API_VERSION, 0)[1] in (None, 0)]


def state(job: ReadState) -> StateAnswer:
    """Return the state of a process and its restore thread, 0 where the driver names none."""
    result, value = cuda.cuCheckpointProcessGetState(job.pid)
    if result:
        refused = _answer(result)
        return StateAnswer(refused.code, refused.name, refused.text)
    result, thread = cuda.cuCheckpointProcessGetRestoreThreadId(job.pid)
    return StateAnswer(state=int(value), thread=0 if result else int(thread))


def lock(job: Lock) -> DriverAnswer:
    arguments = cuda.CUcheckpointLockArgs()
    arguments.timeoutMs = job.timeout_ms
    return _answer(*cuda.cuCheckpointProcessLock(job.pid, arguments))


def checkpoint(job: Checkpoint) -> DriverAnswer:
    return _answer(*cuda.cuCheckpointProcessCheckpoint(job.pid, None))


def restore(job: Restore) -> DriverAnswer:
    arguments = cuda.CUcheckpointRestoreArgs()
    made = [_pair(old, new) for old, new in job.pairs]
    if made:
        arguments.gpuPairs = made
        arguments.gpuPairsCount = len(made)
    return _answer(*cuda.cuCheckpointProcessRestore(job.pid, arguments))


def unlock(job: Unlock) -> DriverAnswer:
    return _answer(*cuda.cuCheckpointProcessUnlock(job.pid, None))


def info() -> DriverInfo:
    """Describe the driver and the GPUs, as far as it and NVML do."""
    _, api_version = cuda.cuDriverGetVersion()
    _, count = cuda.cuDeviceGetCount()
    version, memories, paths = _reported_by_nvml([uuid_of(index) for index in range(count)])
    gpus = [_gpu(index, *reported) for index, reported in enumerate(zip(memories, paths, strict=True))]
    return DriverInfo(int(api_version), version, gpus, missing_calls())


def _gpu(index: int, memory: NvmlMemory | None, paths: dict[str, str]) -> DriverGpu:
    _, name = cuda.cuDeviceGetName(96, index)
    _, total = cuda.cuDeviceTotalMem(index)
    text = name.partition(b"\0")[0].decode(errors="replace")
    return DriverGpu(uuid_of(index), text, int(total), node_near(index), memory, paths)


def uuid_of(index: int) -> str:
    """Return a GPU's own name, "GPU-" and a UUID; `index` is the driver's number of it."""
    _, identity = cuda.cuDeviceGetUuid(index)
    return f"GPU-{uuid.UUID(bytes=bytes(identity.bytes))}"


def node_near(index: int) -> int:
    """Return the NUMA node that a GPU is near, NO_NODE where none is known."""
    result, bus_id = cuda.cuDeviceGetPCIBusId(BUS_ID_BYTES, index)
    return NO_NODE if result else node_of_device(bus_id.partition(b"\0")[0].decode())


def _reported_by_nvml(uuids: Sequence[str]) -> tuple[str, list[NvmlMemory | None], list[dict[str, str]]]:
    """Return the driver's version, and of each GPU what NVML knows and its paths to others; nothing without NVML."""
    try:
        nvml = Nvml()
    except (OSError, AttributeError):
        return "", [None] * len(uuids), [{} for _ in uuids]
    try:
        return nvml.driver_version(), [nvml.memory_of(uuid, _uses[uuid]) for uuid in uuids], _paths(nvml, tuple(uuids))
    finally:
        nvml.close()


_uses: defaultdict[str, Uses] = defaultdict(Uses)  # by GPU, as long as this worker lives
_known_paths: dict[tuple[str, ...], tuple[float, list[dict[str, str]]]] = {}  # by GPUs: when it was asked, the answer


def _paths(nvml: Nvml, uuids: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the paths between GPUs, which are queried rarely: NVLinks may go down, but seldom do."""
    known = _known_paths.get(uuids)
    if known is None or time.monotonic() - known[0] > PATHS_SECONDS:
        try:
            known = time.monotonic(), nvml.paths(uuids)
        except AttributeError:  # an older NVML
            known = time.monotonic(), [{} for _ in uuids]
        _known_paths.clear()
        _known_paths[uuids] = known
    return known[1]


def _pair(old: str, new: str) -> Any:
    pair = cuda.CUcheckpointGpuPair()
    pair.oldUuid, pair.newUuid = _uuid(old), _uuid(new)
    return pair


def _uuid(text: str) -> Any:
    made = cuda.CUuuid()  # its bytes cannot be assigned from Python
    ctypes.memmove(made.getPtr(), uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
    return made


def _answer(result: Any) -> DriverAnswer:
    if not result:
        return DriverAnswer()
    _, name = cuda.cuGetErrorName(result)
    _, text = cuda.cuGetErrorString(result)
    return DriverAnswer(int(result), (name or b"CUDA error %d" % int(result)).decode(), (text or b"unknown").decode())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
