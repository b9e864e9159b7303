"""The tmpfs of the arena: mounted with huge pages, and grown bank by bank."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kybernate_shim.arena import banks
from kybernate_shim.arena.banks import Bank
from kybernate_shim.linux import numa
from kybernate_shim.linux.mount.syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REMOUNT, mount
from kybernate_shim.sizes import NO_NODE

RECORDS_BYTES = 64 << 20  # what the tmpfs holds in addition to the memory
FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC


def mount_folder(folder: Path) -> None:
    """Mount it with huge pages, without them where the kernel has none for a tmpfs. Raises OSError."""
    options = f"mode=0700,size={RECORDS_BYTES}"
    try:
        mount("tmpfs", str(folder), "tmpfs", FLAGS, f"{options},huge=always")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mount("tmpfs", str(folder), "tmpfs", FLAGS, options)


def grow(folder: Path, file: Path, there: Sequence[Bank], more: Sequence[Bank]) -> None:
    """Add banks to those that are there; the file gets their memory. Raises OSError."""
    size = banks.size_of([*there, *more])
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        mount("tmpfs", str(folder), "tmpfs", FLAGS | MS_REMOUNT, f"size={size + RECORDS_BYTES}")
        os.ftruncate(fd, size)
        if any(bank.node != NO_NODE for bank in more):
            _bind(fd, more)
    finally:
        os.close(fd)


def _bind(fd: int, made: Sequence[Bank]) -> None:
    """Set in the kernel where the pages of new banks come from. Raises OSError."""
    with mmap.mmap(fd, 0) as pages:
        anchor = ctypes.c_char.from_buffer(pages)
        try:
            for bank in made:
                if bank.node != NO_NODE:
                    numa.prefer(ctypes.addressof(anchor) + bank.extent.start, bank.extent.size, bank.node)
        finally:
            del anchor  # or the mapping stays
