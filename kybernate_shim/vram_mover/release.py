"""A process gives up what it has inherited of NVIDIA's devices and cannot use, so that CRIU can dump it.

All of its threads are held meanwhile, and what it holds is read again: the evidence cannot change then. Descriptors and
addresses are not left free, since libraries in the process still use them as theirs: a descriptor becomes an eventfd, a
mapping becomes addresses without access. Host memory that can be read, such as pinned memory, becomes private memory of
the process with the same bytes at the same address.

Nothing of this is undone when a checkpoint fails: the driver refuses to work in such a process, with the files or
without. Only memory that was shared with the CUDA process is the process's own from then on; the driver's checkpoint
ends that sharing anyway, because it frees the memory and makes it again.
Sources: process_vm_writev(2), mremap(2), dup(2), kcmp(2).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from struct import pack
from typing import Final

from kybernate_shim.errors import Refused
from kybernate_shim.linux.kcmp import same_descriptors, same_memory
from kybernate_shim.linux.nvidia_devices import DeviceFiles, Majors, Mapping, look
from kybernate_shim.linux.process import start_time, title_of
from kybernate_shim.linux.process_memory import ShortCopy, write_from
from kybernate_shim.linux.ptrace.seized import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_NORESERVE,
    MAP_PRIVATE,
    PROT_READ_WRITE,
    SeizedProcess,
)
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.mover_jobs import Given, Inheritor

MOST_MAPPINGS: Final = 4096  # of one process; a worker of PyTorch's DataLoader was seen with 30
MOST_DESCRIPTORS: Final = 4096  # and 29 of these
PIECE_BYTES: Final = 256 << 20  # of one copy, which has a deadline
PROT_NONE, PROT_READ = 0, 1
MREMAP_MAYMOVE_FIXED: Final = 3


def release(
    inheritor: Inheritor,
    owners: Iterable[int],
    wanted: Majors,
    *,
    seconds: float,
    expired: Callable[[], bool] = lambda: False,
) -> Given:
    """Have a process give up its files of the `wanted` devices.

    `owners` have CUDA state: a process that shares memory or descriptors with one of them is left alone. Each call
    takes at most `seconds`, and none is made when the time has `expired`.
    Raises Refused with nothing changed, or InjectionFailed, after which a part may have been released.
    """
    _require_same(inheritor)  # another process must not even be stopped
    with SeizedProcess(inheritor.pid, spare=lambda name: False, seconds=seconds) as held:
        _require_same(inheritor)
        holds = look(inheritor.pid, wanted)
        _require_alone(held, owners)
        _require_proven(inheritor, holds)
        return _Releasing(held, expired).everything(holds)


def _require_same(inheritor: Inheritor) -> None:
    with suppress(ProcessLookupError):  # it has ended, as the caller that holds it finds out
        if start_time(inheritor.pid) != inheritor.started:
            raise Refused("another process has its pid by now")


def _require_alone(held: SeizedProcess, owners: Iterable[int]) -> None:
    """Refuse threads whose memory or descriptors are also those of a CUDA process, or differ among themselves."""
    for tid in held.tids:
        if tid != held.pid and held.pid in held.tids and not same_descriptors(held.pid, tid):
            raise Refused("its threads have different tables of descriptors")
    for owner in owners:
        with suppress(ProcessLookupError):  # it has ended
            if any(same_memory(owner, tid) or same_descriptors(owner, tid) for tid in held.tids):
                raise Refused(f"it shares memory or descriptors with {title_of(owner)}, which holds CUDA state")


def _require_proven(inheritor: Inheritor, holds: DeviceFiles) -> None:
    if own := holds.descriptors - inheritor.inherited:
        raise Refused(f"descriptor {min(own)} is not inherited from a process with CUDA state, but its own")
    if len(holds.mappings) > MOST_MAPPINGS or len(holds.descriptors) > MOST_DESCRIPTORS:
        raise Refused(f"at most {MOST_MAPPINGS} mappings and {MOST_DESCRIPTORS} descriptors are released")
    if holds.host_bytes > inheritor.host_bytes:
        raise Refused("it maps more of NVIDIA's devices than a moment ago")


class _Releasing:
    """Makes the calls in a held process. Raises InjectionFailed."""

    def __init__(self, held: SeizedProcess, expired: Callable[[], bool]) -> None:
        self._held = held
        self._abi = held.abi
        self._expired = expired

    def everything(self, holds: DeviceFiles) -> Given:
        given = Given(holds.pid, descriptors=len(holds.descriptors))
        for mapping in holds.mappings:
            if self._expired():
                raise InjectionFailed(f"process {holds.pid} took too long to release {holds}")
            kept = mapping.size if mapping.readable_host and self._made_private(mapping) else 0
            if not kept:
                self._empty(mapping)
            given = replace(
                given,
                mappings=given.mappings + 1,
                bytes=given.bytes + mapping.size,
                kept_bytes=given.kept_bytes + kept,
            )
        if holds.descriptors:
            self._replace(holds.descriptors)
        return given

    def _empty(self, mapping: Mapping) -> None:
        """Keep the addresses of a mapping, without access."""
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
        self._call("mmap", self._abi.mmap, mapping.start, mapping.size, PROT_NONE, flags, -1, 0)

    def _made_private(self, mapping: Mapping) -> bool:
        """Put a private copy in the place of a mapping; False where its bytes cannot be read any more."""
        abi, size = self._abi, mapping.size
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
        copy = self._call("mmap", abi.mmap, 0, size, PROT_READ_WRITE, flags, -1, 0)
        try:
            if not self._copied(mapping, copy):
                self._call("munmap", abi.munmap, copy, size)
                return False
            if "w" not in mapping.perms:
                self._call("mprotect", abi.mprotect, copy, size, PROT_READ)
            self._call("mremap", abi.mremap, copy, size, size, MREMAP_MAYMOVE_FIXED, mapping.start)
        except InjectionFailed:
            with suppress(InjectionFailed):
                self._held.call(abi.munmap, copy, size)
            raise
        return True

    def _copied(self, mapping: Mapping, copy: int) -> bool:
        """Have the process itself copy: no other process may read memory that a device's driver has mapped."""
        own = self._call("getpid", self._abi.getpid)
        for done in range(0, mapping.size, PIECE_BYTES):
            piece = min(PIECE_BYTES, mapping.size - done)
            vectors = pack("=QQQQ", mapping.start + done, piece, copy + done, piece)
            self._write(copy + done, vectors)  # the kernel has read them before it writes over them
            number = self._abi.process_vm_writev
            if self._held.call(number, own, copy + done, 1, copy + done + 16, 1, 0) != piece:
                return False
        return True

    def _write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        try:
            write_from(self._held.pid, address, ctypes.addressof(buffer), len(data))
        except (OSError, ShortCopy) as error:
            raise InjectionFailed(f"process {self._held.pid} cannot be written to: {error}") from error

    def _replace(self, descriptors: Iterable[int]) -> None:
        """Put an eventfd, which CRIU can dump, under each number; where no number is free for one, close them."""
        abi = self._abi
        empty = self._held.call(abi.eventfd2, 0, os.O_CLOEXEC)
        for number in sorted(descriptors):
            if empty < 0:
                self._call("close", abi.close, number)
            else:
                self._call("dup3", abi.dup3, empty, number, os.O_CLOEXEC)
        if empty >= 0:
            self._call("close", abi.close, empty)

    def _call(self, name: str, number: int, *arguments: int) -> int:
        result = self._held.call(number, *arguments)
        if -4096 < result < 0:
            raise InjectionFailed(f"{name} in process {self._held.pid}: {os.strerror(-result)}")
        return result
