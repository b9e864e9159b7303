"""A program on NVIDIA's cuda-bindings, as cupy and numba work: NVRTC compiles, the driver's API loads and launches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from tests.gpu.zoo.figures import Impossible, Options, Round, Wrong, checksum

MIB = 1 << 20
SOURCE = b"""
extern "C" __global__ void scale(unsigned *words, unsigned long long count, unsigned factor)
{
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] = words[i] * factor + (unsigned)i;
}
"""


def bindings(options: Options) -> Round:
    try:
        from cuda.bindings import driver, nvrtc  # of the machine
    except ImportError as error:
        raise Impossible(f"cuda-bindings: {error}") from error

    def call(answer: tuple[Any, ...]) -> Any:
        result, *values = answer
        if int(result):
            raise Wrong(f"{result!r}")
        return values[0] if len(values) == 1 else values

    call(driver.cuInit(0))
    device = call(driver.cuDeviceGet(0))
    context = call(driver.cuDevicePrimaryCtxRetain(device))
    call(driver.cuCtxSetCurrent(context))
    try:
        image = _compiled(nvrtc, call, _capability(driver, call, device))
    except (RuntimeError, Wrong) as error:  # the library is loaded when it is called
        raise Impossible(f"NVRTC: {error}") from error
    function = call(driver.cuModuleGetFunction(call(driver.cuModuleLoadData(image)), b"scale"))
    stream = call(driver.cuStreamCreate(1))
    size, count = options.mib * MIB, options.mib * MIB // 4
    memory, other = call(driver.cuMemAlloc(size)), call(driver.cuMemAllocAsync(size, stream))
    pinned = call(driver.cuMemHostAlloc(size, 0))
    view = memoryview((ctypes.c_ubyte * size).from_address(int(pinned))).cast("B")

    def launch(factor: int) -> None:
        values = (int(memory), count, factor)
        kinds = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint)
        call(driver.cuLaunchKernel(function, 512, 1, 1, 256, 1, 1, 0, stream, (values, kinds), 0))

    def a_round() -> Iterator[tuple[str, int]]:
        call(driver.cuMemsetD32Async(memory, 1, count, stream))
        for number in range(10):
            for factor in (3, 5, 7):
                launch(factor)
            call(driver.cuMemcpyDtoDAsync(other, memory, size, stream))
            call(driver.cuMemcpyDtoHAsync(int(pinned), other, size, stream))
            call(driver.cuStreamSynchronize(stream))
            yield f"launches {number}", checksum(view)

    return a_round


def _capability(driver: Any, call: Any, device: Any) -> str:
    kinds = driver.CUdevice_attribute
    names = (
        kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    return "".join(str(call(driver.cuDeviceGetAttribute(name, device))) for name in names)


def _compiled(nvrtc: Any, call: Any, capability: str) -> bytes:
    program = call(nvrtc.nvrtcCreateProgram(SOURCE, b"scale.cu", 0, [], []))
    wanted = [f"--gpu-architecture=compute_{capability}".encode()]
    call(nvrtc.nvrtcCompileProgram(program, len(wanted), wanted))
    image = b" " * call(nvrtc.nvrtcGetPTXSize(program))
    call(nvrtc.nvrtcGetPTX(program, image))
    return image
