"""What NVML reports about a GPU, and libcuda only with a context: memory and which process holds it, driver, MIG mode.

Only the CUDA helper's workers load it. `cuda.bindings` has a complete NVML module, but it wants numpy; eight calls by
ctypes do. Source: docs.nvidia.com "NVML API Reference Guide".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("model", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("text", ctypes.c_char * 32),
    )

    @property
    def place(self) -> tuple[int, int, int]:
        return self.domain, self.bus, self.device


_PATHS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
_MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_MOST_PROCESSES = 1024
_MOST_SAMPLES = 4096
_NOT_FOUND = 6  # NVML_ERROR_NOT_FOUND: no sample, as nothing has computed
_UNKNOWN_BYTES = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


@dataclass
class Uses:
    """When processes last used a GPU, in microseconds by pid; `newest` is the time of the newest sample.

    NVML takes a sample 5 times a second (driver 580, H100), of each process with a context, at work or not.
    NVML answers with an average for each process over the samples since a time, and with the time of the newest of all
    samples. So each look requests the samples since the last one: over all samples, a process would seem to work for as
    long as NVML keeps them, which are some 16 s.
    """

    newest: int = 0
    by_pid: dict[int, int] = field(default_factory=dict)

    def add(self, samples: Iterable[_Sample]) -> None:
        """Take what NVML answers. Beyond _MOST_PROCESSES, the processes that used it least recently are forgotten."""
        for one in samples:
            self.newest = max(one.microseconds, self.newest)
            if one.multiprocessors or one.memory or one.encoder or one.decoder:
                self.by_pid[one.pid] = max(one.microseconds, self.by_pid.get(one.pid, 0))
        self.by_pid = dict(sorted(self.by_pid.items(), key=lambda it: it[1])[-_MOST_PROCESSES:])


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

    def memory_of(self, uuid: str, uses: Uses) -> NvmlMemory | None:
        """Return what is known about the GPU `uuid` ("GPU-…"), or None when NVML does not know it.

        `uses` has what earlier looks have seen of its processes, and is updated.
        """
        gpu, memory, mode, pending = ctypes.c_void_p(), _Memory(), ctypes.c_uint(0), ctypes.c_uint()
        if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(gpu)):
            return None
        if self._library.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)):
            return None
        # Refused by GPUs that have no such mode, which leaves `mode` at 0.
        self._library.nvmlDeviceGetMigMode(gpu, ctypes.byref(mode), ctypes.byref(pending))
        number = ctypes.c_uint(0)
        self._library.nvmlDeviceGetMinorNumber(gpu, ctypes.byref(number))
        computed = self._computed(gpu, uses)
        return NvmlMemory(memory.free, mode.value == 1, number.value, self._holdings(gpu), computed, uses.newest)

    def paths(self, uuids: Sequence[str]) -> list[dict[str, str]]:
        """Return how each GPU is connected to each other one, by that one's UUID, as far as NVML reports it.

        GPUs at a switch have as many NVLinks to each other as the one with fewer has to it.
        """
        gpus = [self._handle(uuid) for uuid in uuids]
        places = [self._place(gpu) for gpu in gpus]
        remotes = [self._remotes(gpu) for gpu in gpus]
        found: list[dict[str, str]] = []
        for one, gpu in enumerate(gpus):
            found.append({})
            for other, uuid in enumerate(uuids):
                if one == other or not gpu or not gpus[other]:
                    continue
                direct = sum(place == places[other] for place in remotes[one])
                switched = min(sum(place not in places for place in remotes[index]) for index in (one, other))
                path = f"NV{direct or switched}" if direct or switched else self._path(gpu, gpus[other])
                if path:
                    found[-1][uuid] = path
        return found

    def _handle(self, uuid: str) -> ctypes.c_void_p:
        gpu = ctypes.c_void_p()
        failed = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(gpu))
        return ctypes.c_void_p() if failed else gpu

    def _path(self, gpu: ctypes.c_void_p, other: ctypes.c_void_p) -> str:
        level = ctypes.c_int()
        if self._library.nvmlDeviceGetTopologyCommonAncestor(gpu, other, ctypes.byref(level)):
            return ""
        return _PATHS.get(level.value, "PIX")  # 0: two GPUs of one board

    def _place(self, gpu: ctypes.c_void_p) -> tuple[int, int, int] | None:
        info = _PciInfo()
        return None if self._library.nvmlDeviceGetPciInfo_v3(gpu, ctypes.byref(info)) else info.place

    def _remotes(self, gpu: ctypes.c_void_p) -> list[tuple[int, int, int]]:
        """Return the PCI device at the other end of each NVLink that is up."""
        found = []
        for link in range(_MOST_LINKS if gpu else 0):
            up, info = ctypes.c_uint(), _PciInfo()
            if self._library.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(up)) or up.value != 1:
                continue
            if not self._library.nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu, link, ctypes.byref(info)):
                found.append(info.place)
        return found

    def _holdings(self, gpu: ctypes.c_void_p) -> dict[int, int]:
        count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), processes):
            return {}
        found = processes[: count.value]
        return {process.pid: process.bytes for process in found if process.bytes != _UNKNOWN_BYTES}

    def _computed(self, gpu: ctypes.c_void_p, uses: Uses) -> dict[int, int] | None:
        """Return when each process last used the GPU, as far as NVML's samples reach; None where there are none.

        NVML takes none of a GPU in MIG mode.
        """
        count, samples = ctypes.c_uint(_MOST_SAMPLES), (_Sample * _MOST_SAMPLES)()
        since = ctypes.c_ulonglong(uses.newest)
        result = self._library.nvmlDeviceGetProcessUtilization(gpu, samples, ctypes.byref(count), since)
        if result not in (0, _NOT_FOUND):
            return None
        uses.add(samples[: 0 if result else count.value])
        return dict(uses.by_pid)
