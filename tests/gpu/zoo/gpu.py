"""The calls of libcuda.so.1 that programs of the zoo make, through ctypes: that needs no package.

Addresses are ints, and every call that does not answer 0 raises Wrong: for a program that is suspended, an error is as
wrong as a figure.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

from tests.gpu.zoo.figures import Wrong, checksum

MIB = 1 << 20
# Advances each of `count` words by a linear congruential generator, as the pretended driver's kernel of that name does.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry advance(.param .u64 words, .param .u64 count)
{
    .reg .pred %p;
    .reg .b32 %block, %size, %thread, %blocks, %value;
    .reg .b64 %base, %left, %index, %stride, %place;
    ld.param.u64 %base, [words];
    ld.param.u64 %left, [count];
    cvta.to.global.u64 %base, %base;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.wide.u32 %index, %block, %size, 0;
    cvt.u64.u32 %stride, %thread;
    add.u64 %index, %index, %stride;
    mul.wide.u32 %stride, %blocks, %size;
LOOP:
    setp.ge.u64 %p, %index, %left;
    @%p bra END;
    mad.lo.u64 %place, %index, 4, %base;
    ld.global.u32 %value, [%place];
    mad.lo.u32 %value, %value, 1664525, 1013904223;
    st.global.u32 [%place], %value;
    add.u64 %index, %index, %stride;
    bra LOOP;
END:
    ret;
}
\0"""


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location", c_int),
        ("win32", c_void_p),
        ("flags", c_uint64),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", c_int), ("location", c_int), ("flags", c_int))


PINNED, DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3
SHAREABLE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Gpu:
    """The primary context of a device, current in the thread that made it; others call `enter`."""

    def __init__(self, device: int = 0) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Wrong(f"no driver: {error}") from error
        self._context = c_void_p()
        self("cuInit", c_uint(0))
        self("cuDevicePrimaryCtxRetain", byref(self._context), c_int(device))
        self.enter()

    def __call__(self, name: str, *arguments: Any) -> None:
        if result := getattr(self._library, name)(*arguments):
            raise Wrong(f"{name} answered {result}")

    def has(self, name: str) -> bool:
        """Whether the driver exports it; the pretended one has not all."""
        return hasattr(self._library, name)

    def enter(self) -> None:
        self("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        self("cuCtxSynchronize")

    def allocate(self, size: int) -> int:
        address = c_uint64()
        self("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self("cuMemFree_v2", c_uint64(address))

    def stream(self) -> c_void_p:
        stream = c_void_p()
        self("cuStreamCreate", byref(stream), c_uint(1))  # CU_STREAM_NON_BLOCKING
        return stream

    def wait(self, stream: c_void_p) -> None:
        self("cuStreamSynchronize", stream)

    def write(self, address: int, data: bytes) -> None:
        self("cuMemcpyHtoD_v2", c_uint64(address), data, c_size_t(len(data)))

    def read(self, address: int, size: int) -> memoryview:
        buffer = bytearray(size)
        self("cuMemcpyDtoH_v2", (c_ubyte * size).from_buffer(buffer), c_uint64(address), c_size_t(size))
        return memoryview(buffer)

    def checksum(self, address: int, size: int) -> int:
        return checksum(self.read(address, size))

    def fill(self, address: int, value: int, size: int) -> None:
        self("cuMemsetD8_v2", c_uint64(address), c_ubyte(value), c_size_t(size))

    def fill_words(self, address: int, value: int, count: int, stream: c_void_p | None = None) -> None:
        self("cuMemsetD32Async", c_uint64(address), c_uint(value), c_size_t(count), stream)

    def fill_halves(self, address: int, value: int, count: int) -> None:
        self("cuMemsetD16_v2", c_uint64(address), c_ushort(value), c_size_t(count))

    def kernel(self, name: bytes = b"advance", image: bytes = PTX) -> c_void_p:
        module, function = c_void_p(), c_void_p()
        self("cuModuleLoadData", byref(module), image)
        self("cuModuleGetFunction", byref(function), module, name)
        return function

    def launch(self, function: c_void_p, words: int, count: int, stream: c_void_p | None = None) -> None:
        """Launch a kernel that takes an address and a count."""
        values = c_uint64(words), c_uint64(count)
        pointers = (c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        one = c_uint(1)
        self(
            "cuLaunchKernel", function, c_uint(256), one, one, c_uint(256), one, one, c_uint(0), stream, pointers, None
        )

    def make(self, size: int, shareable: int = 0) -> int:
        """Make memory of the device that is mapped nowhere, and return its handle."""
        handle, wanted = c_uint64(), AllocationProperties(PINNED, shareable, DEVICE, 0)
        self("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_uint64())
        return handle.value

    def reserve(self, size: int) -> int:
        address = c_uint64()
        self("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(), c_uint64(), c_uint64())
        return address.value

    def map(self, address: int, size: int, handle: int) -> None:
        self("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(), c_uint64(handle), c_uint64())
        access = Access(DEVICE, 0, READ_WRITE)
        self("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self("cuMemUnmap", c_uint64(address), c_size_t(size))

    def release(self, handle: int) -> None:
        self("cuMemRelease", c_uint64(handle))


class Host:
    """Host memory of one kind: "pageable", "registered" or "pinned"."""

    def __init__(self, gpu: Gpu, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        if kind == "pinned":
            found = c_void_p()
            gpu("cuMemHostAlloc", byref(found), c_size_t(size), c_uint(0))
            self.address = found.value or 0
            self._memory: Any = (c_ubyte * size).from_address(self.address)
        else:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.address = ctypes.addressof((c_ubyte * size).from_buffer(self._memory))
        if kind == "registered":
            gpu("cuMemHostRegister_v2", c_void_p(self.address), c_size_t(size), c_uint(0))
        self.view = memoryview(self._memory).cast("B")

    def clear(self, size: int) -> None:
        ctypes.memset(self.address, 0, size)


def can_pin(gpu: Gpu) -> bool:
    return gpu.has("cuMemHostAlloc")
