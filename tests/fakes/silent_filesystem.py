"""A filesystem with a file, and a socket where a program binds one, whose server stops answering, as without a network.

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
LOOKUP, GETATTR, MKNOD, OPEN, FLUSH, INIT = 1, 3, 8, 14, 25, 26
ROOT, FILE, SOCKET = 1, 2, 3
MODES = {ROOT: stat.S_IFDIR | 0o777, FILE: stat.S_IFREG | 0o644, SOCKET: stat.S_IFSOCK | 0o777}
DETACH = 2


def attributes(node: int) -> bytes:
    return struct.pack("=6Q10I", node, SIZE, 8, 0, 0, 0, 0, 0, 0, MODES[node], 1, 0, 0, 0, 4096, 0)


def entry(node: int) -> bytes:
    return struct.pack("=4Q2I", node, 1, 0, 0, 0, 0) + attributes(node)


ANSWERS = {
    INIT: struct.pack("=IIIIHHI", 7, 22, 0, 0, 1, 1, 4096),
    OPEN: struct.pack("=QII", 1, 0, 0),
}


class SilentFilesystem:
    """Answers while it is `speaking`; what it says of attributes is to be asked for again each time."""

    def __init__(self, device: int) -> None:
        self.speaking = threading.Event()
        self.speaking.set()
        self._device = device
        self._has_socket = False

    def serve(self) -> None:
        """Answer until the filesystem is unmounted."""
        while True:
            try:
                request = os.read(self._device, 1 << 17)
            except OSError:
                return
            _, kind, unique, node, *_ = HEADER.unpack_from(request)
            self.speaking.wait()
            self._answer(kind, unique, node, request[HEADER.size :])

    def _answer(self, kind: int, unique: int, node: int, words: bytes) -> None:
        body, error = ANSWERS.get(kind), 0
        if kind == GETATTR:
            body = struct.pack("=QII", 0, 0, 0) + attributes(node)
        elif kind == MKNOD:
            self._has_socket, body = True, entry(SOCKET)
        elif kind == LOOKUP and words == NAME.encode() + b"\0":
            body = entry(FILE)
        elif kind == LOOKUP and self._has_socket:
            body = entry(SOCKET)
        elif body is None:
            error = -errno.ENOENT if kind == LOOKUP else -errno.ENOSYS
        os.write(self._device, ANSWER.pack(ANSWER.size + len(body or b""), error, unique) + (body or b""))


@contextmanager
def silent_filesystem(place: Path) -> Iterator[SilentFilesystem]:
    """Mount one at `place`, a directory."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    filesystem = SilentFilesystem(device)
    serving = threading.Thread(target=filesystem.serve)
    try:
        syscalls.mount("fuse", str(place), "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other")
        serving.start()
        yield filesystem
    finally:
        filesystem.speaking.set()
        syscalls.umount(str(place), DETACH)
        serving.join(10)
        os.close(device)
