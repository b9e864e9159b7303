"""Hashes pieces of VRAM on their GPU, by a kernel in hashing.cu, to detect which of them have changed.

What a program writes must not be able to make two different pieces look the same, by chance or by intent. So each
process has a random key, which no process of a container can read, and the hash is one with a proof of that:

    NH of chunks of 256 bytes, for four lanes that share a Toeplitz key: two chunks that differ collide in all of any n
    lanes with a probability of at most 2^-32n. (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC", Crypto '99.)
    A polynomial over the 64 chunks of a thread, modulo 2^61 - 1, whose 128 coefficients are the halves of NH's sums: at
    most 2^-53 in each lane.
    A sum of these, each times a random number modulo 2^61 - 1, of which 32 bits are taken: at most 2^-30.9.

Together at most (2^-32 + 2^-53 + 2^-30.9)^4 < 2^-120 for two pieces that were chosen without knowing the key, which
SHAKE-256 stretches to all the numbers. No hash decides that a piece is all zeros: the kernel looks at its bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import shake_256
from typing import Any

from kybernate_shim.arena.pieces import MARK, PIECE, PieceHashes
from kybernate_shim.cuda_worker.bindings import driver as cuda
from kybernate_shim.cuda_worker.calls import checked

# As in hashing.cu.
THREADS, LOADS, LANES = 128, 16, 4
PRIME = (1 << 61) - 1
NH_WORDS = LOADS * 4 + (LANES - 1) * 2
SUMS_BYTES = (2 * LANES + 1) * 8

MOST = 1 << 14  # pieces at a time: 32 GiB, for which the GPU must have 1.6 MB in addition to the context
ADDRESSES_AT = THREADS * LANES * 8
SUMS_AT = ADDRESSES_AT + MOST * 8
MARKS_AT = SUMS_AT + MOST * SUMS_BYTES
ANY_AT = MARKS_AT + MOST * MARK
SCRATCH = ANY_AT + MOST * 4


class Keys(ctypes.Structure):
    """The kernel's `struct keys`."""

    _fields_ = (("base", ctypes.c_uint64 * LANES), ("nh", ctypes.c_uint32 * NH_WORDS))


class Hasher:
    """The kernels on one GPU. To be used in that GPU's context, by one thread at a time."""

    def __init__(self, code: bytes) -> None:
        """`code` is what kernel.machine_code returns for this GPU. Raises DriverRefused."""
        module = checked(cuda.cuModuleLoadData(code))
        self._hash = checked(cuda.cuModuleGetFunction(module, b"hash_pieces"))
        self._finish = checked(cuda.cuModuleGetFunction(module, b"finish_pieces"))
        self._scratch = int(checked(cuda.cuMemAlloc(SCRATCH)))

    def look(self, blocks: Sequence[tuple[int, int]], key: bytes, stream: Any) -> list[PieceHashes]:
        """Hash all pieces of `blocks`, each an address on the GPU and a size in bytes; waits for that.

        Raises DriverRefused.
        """
        addresses = array("Q")
        for address, size in blocks:
            addresses.extend(range(address, address + size, PIECE))
        marks, bits = bytearray(), array("I")
        for first in range(0, len(addresses), MOST):
            self._look(addresses[first : first + MOST], key, stream, marks, bits)
        return list(_shared_out(blocks, bytes(marks), bits))

    def _look(self, addresses: array[int], key: bytes, stream: Any, marks: bytearray, bits: array[int]) -> None:
        """Do one launch, all on one stream: the copies from pageable memory are ordered with the kernels by that."""
        count, at = len(addresses), self._scratch
        keys, spread = stretched(key)
        found, flags = (ctypes.c_char * (count * MARK))(), (ctypes.c_uint32 * count)()
        try:
            checked(cuda.cuMemcpyHtoDAsync(at, ctypes.addressof(spread), ctypes.sizeof(spread), stream))
            checked(cuda.cuMemcpyHtoDAsync(at + ADDRESSES_AT, addresses.buffer_info()[0], count * 8, stream))
            checked(cuda.cuMemsetD32Async(at + SUMS_AT, 0, count * SUMS_BYTES // 4, stream))
            where = (ctypes.c_uint64(at + ADDRESSES_AT), ctypes.c_uint64(PIECE), ctypes.c_uint64(at))
            _launch(self._hash, count, stream, *where, ctypes.c_uint64(at + SUMS_AT), keys)
            results = (ctypes.c_uint64(at + MARKS_AT), ctypes.c_uint64(at + ANY_AT))
            sums = (ctypes.c_uint64(at + SUMS_AT), ctypes.c_uint32(count))
            _launch(self._finish, -(-count // THREADS), stream, *sums, *results)
            checked(cuda.cuMemcpyDtoHAsync(ctypes.addressof(found), at + MARKS_AT, count * MARK, stream))
            checked(cuda.cuMemcpyDtoHAsync(ctypes.addressof(flags), at + ANY_AT, count * 4, stream))
        finally:
            synchronized = cuda.cuStreamSynchronize(stream)  # before the buffers go
        checked(synchronized)
        marks += found
        bits.extend(flags)


@lru_cache(maxsize=8)
def stretched(key: bytes) -> tuple[Keys, ctypes.Array[ctypes.c_uint64]]:
    """Return the kernel's keys, and its THREADS numbers for each lane."""
    stream = shake_256(key).digest(NH_WORDS * 4 + LANES * (1 + THREADS) * 8)
    numbers = array("Q", stream[NH_WORDS * 4 :])
    fit = [number & PRIME for number in numbers]  # 2^61 - 1 is equivalent to 0, and as rare
    nh = (ctypes.c_uint32 * NH_WORDS).from_buffer_copy(stream)
    return Keys((ctypes.c_uint64 * LANES)(*fit[:LANES]), nh), (ctypes.c_uint64 * (LANES * THREADS))(*fit[LANES:])


def _launch(kernel: Any, blocks: int, stream: Any, *values: Any) -> None:
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    checked(cuda.cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0))


def _shared_out(blocks: Sequence[tuple[int, int]], marks: bytes, bits: Sequence[int]) -> Iterator[PieceHashes]:
    at = 0
    for _, size in blocks:
        end = at + size // PIECE
        yield PieceHashes(marks[at * MARK : end * MARK], bits[at:end])
        at = end
