"""What NVML tells about a GPU and libcuda does not tell without a context: memory and who holds it, driver, MIG mode.

Only the CUDA helper's workers load it. `cuda.bindings` has a complete NVML module, but it wants numpy; seven calls by
ctypes do. Source: docs.nvidia.com "NVML API Reference Guide".
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_MOST_PROCESSES = 1024
_UNKNOWN_BYTES = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


@dataclass(frozen=True)
class GpuFacts:
    """`mig`: whether the GPU is split into instances. `number` is its device node's. Sizes are bytes.

    `holdings` are the bytes by pid, as this process's pid namespace counts them.
    """

    total_bytes: int
    free_bytes: int
    mig: bool
    number: int
    holdings: dict[int, int]


class Nvml:
    """An open NVML. Raises OSError when it cannot be loaded or has no driver below it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if result := self._library.nvmlInit_v2():
            raise OSError(f"nvmlInit_v2 failed with {result}")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def driver_version(self) -> str:
        """Return the version of the kernel driver, such as "580.159.04"; empty when it is not told."""
        text = ctypes.create_string_buffer(96)
        if self._library.nvmlSystemGetDriverVersion(text, len(text)):
            return ""
        return text.value.decode()

    def facts(self, uuid: str) -> GpuFacts | None:
        """Return what is known about the GPU `uuid` ("GPU-…"), or None when NVML does not know it."""
        gpu, memory, mode, pending = ctypes.c_void_p(), _Memory(), ctypes.c_uint(0), ctypes.c_uint()
        if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(gpu)):
            return None
        if self._library.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)):
            return None
        # Refused by GPUs that have no such mode, which leaves `mode` at 0.
        self._library.nvmlDeviceGetMigMode(gpu, ctypes.byref(mode), ctypes.byref(pending))
        number = ctypes.c_uint(0)
        self._library.nvmlDeviceGetMinorNumber(gpu, ctypes.byref(number))
        return GpuFacts(memory.total, memory.free, mode.value == 1, number.value, self._holdings(gpu))

    def _holdings(self, gpu: ctypes.c_void_p) -> dict[int, int]:
        count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), processes):
            return {}
        found = processes[: count.value]
        return {process.pid: process.bytes for process in found if process.bytes != _UNKNOWN_BYTES}
