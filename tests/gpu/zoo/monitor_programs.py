"""Programs that watch their own GPU while they compute, as monitors of training and inference do in their process."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
import time
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from pathlib import Path

from tests.gpu.zoo.driver_programs import kernels
from tests.gpu.zoo.figures import Impossible, Options, Round, require
from tests.gpu.zoo.torch_programs import allocator, loaded

PAUSE_SECONDS = 0.005
MOST_PROCESSES = 64
# A monitor without an interpreter: a thread of C, which calls NVML far more often.
MONITOR = r"""
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
extern int nvmlInit_v2(void), nvmlDeviceGetHandleByIndex_v2(unsigned, void **);
extern int nvmlDeviceGetMemoryInfo(void *, unsigned long long *);
extern int nvmlDeviceGetUtilizationRates(void *, unsigned *);
static void *watch(void *unused)
{
    unsigned long long memory[8];
    unsigned rates[2];
    void *device;
    (void)unused;
    if (nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device))
        abort();
    for (;; usleep(200)) {
        if (nvmlDeviceGetMemoryInfo(device, memory))
            abort();
        nvmlDeviceGetUtilizationRates(device, rates);
    }
    return NULL;
}
int begin(void)
{
    pthread_t thread;
    return pthread_create(&thread, NULL, watch, NULL);
}
"""


def nvml(options: Options) -> Round:
    """Ask NVML for memory, load and processes in a thread, as pynvml does, and compute."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    require(library.nvmlInit_v2() == 0, "NVML begins")
    device = c_void_p()
    require(library.nvmlDeviceGetHandleByIndex_v2(c_uint(0), byref(device)) == 0, "NVML finds the GPU")

    def watch() -> None:
        room = (c_ulonglong * 4096)()
        while True:
            require(library.nvmlDeviceGetMemoryInfo(device, room) == 0, "NVML reports the memory")
            library.nvmlDeviceGetUtilizationRates(device, room)
            library.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(c_uint(MOST_PROCESSES)), room)
            time.sleep(PAUSE_SECONDS)

    threading.Thread(target=watch, daemon=True).start()
    return kernels(options)


def nvml_in_c(options: Options) -> Round:
    """Ask NVML in a thread of C, and compute. Needs a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "monitor.c"), Path(folder, "monitor.so")
        source.write_text(MONITOR)
        library = _library("libnvidia-ml.so.1")
        argv = ["cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(source), library, "-pthread"]
        try:
            subprocess.run(argv, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Impossible(f"no C compiler: {error}") from error
        require(ctypes.CDLL(str(made)).begin() == 0, "a thread begins")
    return kernels(options)


def _library(name: str) -> str:
    """Return where a library is that this process can load."""
    ctypes.CDLL(name)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith(name[:-5]))


def torch_watched(options: Options) -> Round:
    """Ask PyTorch for its memory and the GPU's in a thread, and allocate."""
    torch = loaded()

    def watch() -> None:
        while True:
            torch.cuda.memory_allocated()
            torch.cuda.mem_get_info()
            torch.cuda.utilization()
            time.sleep(PAUSE_SECONDS)

    torch.cuda.init()
    threading.Thread(target=watch, daemon=True).start()
    return allocator(options)
