"""A filesystem with one file, whose server stops answering: as a network's does that has lost its network.

The wire format is the kernel's, include/uapi/linux/fuse.h, protocol 7.22.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.linux.mount import syscalls

NAME = "file"
SIZE = 4096
HEADER, ANSWER = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
LOOKUP, GETATTR, OPEN, FLUSH, INIT = 1, 3, 14, 25, 26
ROOT, FILE = 1, 2
DETACH = 2


def attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    return struct.pack("=6Q10I", node, SIZE, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


ANSWERS = {
    INIT: struct.pack("=IIIIHHI", 7, 22, 0, 0, 1, 1, 4096),
    LOOKUP: struct.pack("=4Q2I", FILE, 1, 0, 0, 0, 0) + attributes(FILE),
    OPEN: struct.pack("=QII", 1, 0, 0),
}


class SilentFilesystem:
    """Answers while it is `speaking`; what it says of attributes is to be asked for again each time."""

    def __init__(self, device: int) -> None:
        self.speaking = threading.Event()
        self.speaking.set()
        self._device = device

    def serve(self) -> None:
        """Answer until the filesystem is unmounted."""
        while True:
            try:
                request = os.read(self._device, 1 << 17)
            except OSError:
                return
            _, kind, unique, node, *_ = HEADER.unpack_from(request)
            self.speaking.wait()
            self._answer(kind, unique, node)

    def _answer(self, kind: int, unique: int, node: int) -> None:
        body = struct.pack("=QII", 0, 0, 0) + attributes(node) if kind == GETATTR else ANSWERS.get(kind)
        error = -errno.ENOSYS if body is None else 0
        os.write(self._device, ANSWER.pack(ANSWER.size + len(body or b""), error, unique) + (body or b""))


@contextmanager
def silent_filesystem(place: Path) -> Iterator[SilentFilesystem]:
    """Mount one at `place`, a directory."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    filesystem = SilentFilesystem(device)
    serving = threading.Thread(target=filesystem.serve)
    try:
        syscalls.mount("fuse", str(place), "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
        serving.start()
        yield filesystem
    finally:
        filesystem.speaking.set()
        syscalls.umount(str(place), DETACH)
        serving.join(10)
        os.close(device)
