"""A program's VRAM behind a descriptor, mapped a second time in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kybernate_shim.cuda_worker.bindings import driver as cuda
from kybernate_shim.cuda_worker.calls import checked


@contextmanager
def imported(descriptors: Sequence[int]) -> Iterator[list[Any]]:
    """Yield the driver's handles of the memory behind `descriptors`. Raises DriverRefused."""
    handles: list[Any] = []
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    try:
        for descriptor in descriptors:
            handles.append(checked(cuda.cuMemImportFromShareableHandle(descriptor, kind)))
        yield handles
    finally:
        for handle in handles:
            cuda.cuMemRelease(handle)


@contextmanager
def mapped(gpu: int, handle: Any, size: int) -> Iterator[int]:
    """Map memory for its GPU, in whose context we are; yield its address. Raises DriverRefused."""
    address = int(checked(cuda.cuMemAddressReserve(size, 0, 0, 0)))
    try:
        checked(cuda.cuMemMap(address, size, 0, handle, 0))
        try:
            checked(cuda.cuMemSetAccess(address, size, [_read_write(gpu)], 1))
            yield address
        finally:
            cuda.cuMemUnmap(address, size)
    finally:
        cuda.cuMemAddressFree(address, size)


def gpu_of(handle: Any) -> int:
    """Return our number of the GPU that memory is on. Raises DriverRefused."""
    return int(checked(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).location.id)


def _read_write(device: int) -> Any:
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
