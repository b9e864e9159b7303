"""The driver's checkpoint calls, through `cuda.bindings.driver`. Only the CUDA helper's workers import this module.

A call that the driver refuses is a result here, not an exception: refusals are what callers decide by.
Source: docs.nvidia.com "CUDA Driver API", CUDA checkpointing.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from kybernate_shim.config import NO_NODE
from kybernate_shim.cuda.nvml import Nvml
from kybernate_shim.linux.numa import node_of_device

API_VERSION = 12080  # CUDA 12.8, the first with these calls
BUS_ID_BYTES = 32
NOT_FOUND = 500  # the driver lacks a call
CALLS = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)


class DriverUnusable(Exception):
    """libcuda cannot be loaded or does not initialize; the message says which."""


@dataclass(frozen=True)
class Answer:
    """The driver's answer: `code` 0 is success.

    `state` and `thread` are given by `state` alone, the rest by what the arena does: `bytes`, how many of them it had
    already, are zeros or were prefetched, how many it left to the driver, and a `remark` on why it copied more than it
    should have to.
    """

    code: int = 0
    name: str = ""
    text: str = ""
    state: int | None = None
    thread: int | None = None
    bytes: int = 0
    clean_bytes: int = 0
    zero_bytes: int = 0
    prefetched_bytes: int = 0
    left_bytes: int = 0
    remark: str = ""


def initialize() -> None:
    """Load libcuda and initialize it, without a context, so that none of a GPU's memory is taken.

    Raises DriverUnusable.
    """
    try:
        (result,) = cuda.cuInit(0)
    except Exception as error:  # the loader raises types of its own, which differ by version
        raise DriverUnusable(f"the CUDA driver cannot be loaded: {_first_line(error)}") from error
    if result:
        answer = _answer(result)
        raise DriverUnusable(f"the CUDA driver does not initialize: {answer.name} ({answer.text})")


def missing_calls() -> list[str]:
    """Return the names of the checkpoint calls that this driver does not have."""
    return [name for name in CALLS if cuda.cuGetProcAddress(name.encode(), API_VERSION, 0)[1] in (None, 0)]


def state(pid: int) -> Answer:
    """Return the state of `pid` and its restore thread, 0 where the driver names none."""
    result, value = cuda.cuCheckpointProcessGetState(pid)
    if result:
        return _answer(result)
    result, thread = cuda.cuCheckpointProcessGetRestoreThreadId(pid)
    return Answer(state=int(value), thread=0 if result else int(thread))


def lock(pid: int, timeout_ms: int) -> Answer:
    """Lock `pid`; when its work does not drain within `timeout_ms`, the driver answers NOT_READY and it runs on."""
    arguments = cuda.CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    return _answer(*cuda.cuCheckpointProcessLock(pid, arguments))


def checkpoint(pid: int) -> Answer:
    return _answer(*cuda.cuCheckpointProcessCheckpoint(pid, None))


def restore(pid: int, pairs: Iterable[Sequence[str]]) -> Answer:
    """Restore `pid`; `pairs` are (old, new) UUIDs of all GPUs that it could open, or none."""
    arguments = cuda.CUcheckpointRestoreArgs()
    made = [_pair(old, new) for old, new in pairs]
    if made:
        arguments.gpuPairs = made
        arguments.gpuPairsCount = len(made)
    return _answer(*cuda.cuCheckpointProcessRestore(pid, arguments))


def unlock(pid: int) -> Answer:
    return _answer(*cuda.cuCheckpointProcessUnlock(pid, None))


def info() -> dict[str, Any]:
    """Return what helper.Info answers, as plain values: versions, devices and missing calls."""
    _, api_version = cuda.cuDriverGetVersion()
    _, count = cuda.cuDeviceGetCount()
    devices = [_device(index) for index in range(count)]
    return {
        "api_version": int(api_version),
        "missing_calls": missing_calls(),
        "devices": devices,
        "driver_version": _add_nvml_facts(devices),
    }


def _device(index: int) -> dict[str, Any]:
    _, name = cuda.cuDeviceGetName(96, index)
    _, total = cuda.cuDeviceTotalMem(index)
    return {
        "uuid": uuid_of(index),
        "name": name.partition(b"\0")[0].decode(),
        "total_bytes": int(total),
        "numa_node": node_near(index),
    }


def uuid_of(index: int) -> str:
    """Return a card's name for itself, "GPU-" and a UUID; `index` is the driver's number of it."""
    _, identity = cuda.cuDeviceGetUuid(index)
    return f"GPU-{uuid.UUID(bytes=bytes(identity.bytes))}"


def node_near(index: int) -> int:
    """Return the NUMA node that a card is near, NO_NODE where none is known."""
    result, bus_id = cuda.cuDeviceGetPCIBusId(BUS_ID_BYTES, index)
    return NO_NODE if result else node_of_device(bus_id.partition(b"\0")[0].decode())


def _add_nvml_facts(devices: list[dict[str, Any]]) -> str:
    """Complete `devices` in place by what NVML knows and return the driver's version; "" where NVML is missing."""
    try:
        nvml = Nvml()
    except (OSError, AttributeError):
        return ""
    try:
        for device in devices:
            if facts := nvml.facts(device["uuid"]):
                holdings = [{"pid": pid, "bytes": size} for pid, size in facts.holdings.items()]
                device |= {"free_bytes": facts.free_bytes, "free_known": True, "mig": facts.mig}
                device |= {"number": facts.number, "holdings": holdings}
        return nvml.driver_version()
    finally:
        nvml.close()


def _pair(old: str, new: str) -> Any:
    pair = cuda.CUcheckpointGpuPair()
    pair.oldUuid, pair.newUuid = _uuid(old), _uuid(new)
    return pair


def _uuid(text: str) -> Any:
    made = cuda.CUuuid()  # its bytes cannot be assigned from Python
    ctypes.memmove(made.getPtr(), uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
    return made


def _answer(result: Any) -> Answer:
    if not result:
        return Answer()
    _, name = cuda.cuGetErrorName(result)
    _, text = cuda.cuGetErrorString(result)
    return Answer(int(result), (name or b"CUDA error %d" % int(result)).decode(), (text or b"unknown").decode())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


VERBS: Mapping[str, Callable[..., Answer]] = {
    "state": state,
    "lock": lock,
    "checkpoint": checkpoint,
    "restore": restore,
    "unlock": unlock,
}
