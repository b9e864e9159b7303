"""Loop devices: a file as a block device, for as long as something uses it. Source: loop(4)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from struct import pack

LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A  # Linux 5.8
LO_FLAGS_READ_ONLY = 1
LO_FLAGS_AUTOCLEAR = 4
ATTEMPTS = 32


@contextmanager
def loop_device(file: str, *, read_only: bool) -> Iterator[str]:
    """Yield the path of a block device that shows `file`.

    The device detaches itself when its last user is gone: a filesystem mounted inside the block keeps it, and without
    one it is free again at the block's end. Raises OSError that names `file` or the device.
    """
    flags = LO_FLAGS_AUTOCLEAR | (LO_FLAGS_READ_ONLY if read_only else 0)
    backing = os.open(file, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    try:
        path, device = _attach(backing, file, flags)
    finally:
        os.close(backing)
    try:
        yield path
    finally:
        os.close(device)


def _attach(backing: int, file: str, flags: int) -> tuple[str, int]:
    config = _loop_config(backing, file, flags)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(ATTEMPTS):
            path = f"/dev/loop{ioctl(control, LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                ioctl(device, LOOP_CONFIGURE, config)
                return path, device
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # busy: another process took the free device first
                    raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, f"no free loop device in {ATTEMPTS} attempts", file)


def _loop_config(backing: int, file: str, flags: int) -> bytes:
    """Return a struct loop_config: descriptor, block size, struct loop_info64, reserved."""
    info = pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, os.fsencode(file)[:63], b"", b"", 0, 0)
    return pack("=II", backing, 0) + info + bytes(64)
