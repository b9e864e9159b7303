"""What NVML reports about a GPU, and libcuda only with a context: memory and which process holds it, driver, MIG mode.

Only the CUDA helper's workers load it. `cuda.bindings` has a complete NVML module, but it wants numpy; eight calls by
ctypes do. Source: docs.nvidia.com "NVML API Reference Guide".
"""

from __future__ import annotations

import ctypes

from kybernate_shim.worker_protocol.cuda_jobs import NvmlMemory


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Sample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t: percentages of the sample's time."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("microseconds", ctypes.c_ulonglong),
        ("multiprocessors", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


_MOST_PROCESSES = 1024
_MOST_SAMPLES = 4096
_NOT_FOUND = 6  # NVML_ERROR_NOT_FOUND: no sample, as nothing has computed
_UNKNOWN_BYTES = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


class Nvml:
    """An open NVML. Raises OSError when it cannot be loaded or has no driver below it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if result := self._library.nvmlInit_v2():
            raise OSError(f"nvmlInit_v2 failed with {result}")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def driver_version(self) -> str:
        """Return the version of the kernel driver, such as "580.159.04"; empty when NVML does not report it."""
        text = ctypes.create_string_buffer(96)
        if self._library.nvmlSystemGetDriverVersion(text, len(text)):
            return ""
        return text.value.decode(errors="replace")

    def memory_of(self, uuid: str) -> NvmlMemory | None:
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
        return NvmlMemory(memory.free, mode.value == 1, number.value, self._holdings(gpu), self._computed(gpu))

    def _holdings(self, gpu: ctypes.c_void_p) -> dict[int, int]:
        count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), processes):
            return {}
        found = processes[: count.value]
        return {process.pid: process.bytes for process in found if process.bytes != _UNKNOWN_BYTES}

    def _computed(self, gpu: ctypes.c_void_p) -> dict[int, int] | None:
        """Return when each process last used the GPU, as far as NVML's samples reach back; None where it takes none.

        It takes none of a GPU in MIG mode.
        """
        count, samples = ctypes.c_uint(_MOST_SAMPLES), (_Sample * _MOST_SAMPLES)()
        everything = ctypes.c_ulonglong(0)
        result = self._library.nvmlDeviceGetProcessUtilization(gpu, samples, ctypes.byref(count), everything)
        if result:
            return {} if result == _NOT_FOUND else None
        found: dict[int, int] = {}
        for one in samples[: count.value]:
            if one.multiprocessors or one.memory or one.encoder or one.decoder:
                found[one.pid] = max(one.microseconds, found.get(one.pid, 0))
        return found
