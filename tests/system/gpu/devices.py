"""Device files that forked processes inherit, for the pretended driver: two loop devices with NVIDIA's name.

They stand in for NVIDIA's: char devices that can be mapped are not to be had everywhere. The kernel's table of devices
is shown with NVIDIA's name in the place of theirs.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

LOOP_MAJOR = 7
CONTROL_MINOR = 255
LOOP_SET_FD, LOOP_CLR_FD, LOOP_CTL_ADD, LOOP_CTL_REMOVE = 0x4C00, 0x4C01, 0x4C80, 0x4C81
LOOP_SET_STATUS64, LOOP_GET_STATUS64, AUTOCLEAR = 0x4C04, 0x4C05, 4
STATUS = struct.Struct("=52xI176x")  # loop_info64, of which this has the flags
MEMBERS = (CONTROL_MINOR, CONTROL_MINOR - 1)  # for host memory, and for a GPU
TABLE = Path("/run/fake-cuda-devices")
WAIT_SECONDS, LEFT_SECONDS = 120, 5


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Make the devices; several nodes on one machine take turns, since loop devices are the machine's."""
    with ExitStack() as undo:
        directory = tmp_path_factory.mktemp("devices")
        control = directory / "loop-control"
        os.mknod(control, stat.S_IFCHR | 0o600, os.makedev(10, 237))
        paths = [loop_device(undo, control, directory / str(number), number) for number in MEMBERS]
        TABLE.write_text(Path("/proc/devices").read_text().replace(f"{LOOP_MAJOR} loop", f"{LOOP_MAJOR} nvidia"))
        undo.callback(TABLE.unlink)
        subprocess.run(["mount", "--bind", TABLE, "/proc/devices"], check=True)
        undo.callback(subprocess.run, ["umount", "/proc/devices"], check=True)
        yield paths


def loop_device(undo: ExitStack, control: Path, backing: Path, number: int) -> str:
    path = f"/dev/loop{number}"
    until = time.monotonic() + WAIT_SECONDS
    with backing.open("wb+") as file, control.open("rb") as controller:
        file.truncate(1 << 20)
        while True:
            try:
                fcntl.ioctl(controller, LOOP_CTL_ADD, number)
                break
            except FileExistsError:
                assert time.monotonic() < until, f"{path} stays in use"
                time.sleep(0.2)
                if time.monotonic() > until - WAIT_SECONDS + LEFT_SECONDS:
                    with suppress(OSError):  # in use
                        fcntl.ioctl(controller, LOOP_CTL_REMOVE, number)  # left by a node that was killed
        os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(LOOP_MAJOR, number))
        Path(path).chmod(0o666)  # as the driver's, whatever the umask is: a container's user is not root
        undo.callback(os.unlink, path)
        undo.callback(remove, control, number)
        device = undo.enter_context(open(path, "rb+"))  # noqa: PTH123, SIM115  # a device, closed by the stack
        fcntl.ioctl(device, LOOP_SET_FD, file.fileno())
        clear_with_its_last_user(device)
        undo.callback(fcntl.ioctl, device, LOOP_CLR_FD)
    return path


def clear_with_its_last_user(device: BinaryIO) -> None:
    """Have the kernel take the file from the device when no process has it open: a node may be killed."""
    status = bytearray(STATUS.size)
    fcntl.ioctl(device, LOOP_GET_STATUS64, status)
    (flags,) = STATUS.unpack(status)
    struct.pack_into("=I", status, 52, flags | AUTOCLEAR)
    fcntl.ioctl(device, LOOP_SET_STATUS64, status)


def remove(control: Path, number: int) -> None:
    with control.open("rb") as controller:
        fcntl.ioctl(controller, LOOP_CTL_REMOVE, number)


def flags(devices: list[str]) -> list[str]:
    return [
        *(word for path in devices for word in ("--device", path)),
        *("--env", f"FAKE_CUDA_DEVICES={':'.join(devices)}"),
    ]
