"""A filesystem that takes no more than some bytes a second, as that of a busy disk or of a network.

It shows another directory. Each write is answered when the disk would have it: the kernel caches none, so that a
program that writes waits as long. The wire format is the kernel's, include/uapi/linux/fuse.h, protocol 7.22.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kybernate_shim.linux.mount import syscalls

HEADER, ANSWER = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
LONGEST: Final = 128 << 10  # bytes of one write
BIG_WRITES: Final = 1 << 5
UNANSWERED: Final = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
MODE, OWNER, GROUP, SIZE = 1, 2, 4, 8  # what SETATTR changes
ROOT: Final = 1
DETACH: Final = 2


class SlowFilesystem:
    """Shows `backing`, and takes `rate` bytes a second; it may be changed at any time."""

    def __init__(self, device: int, backing: Path, rate: float) -> None:
        self.rate = rate
        self._device, self._backing = device, backing
        self._paths: dict[int, str] = {ROOT: "."}
        self._free_at = 0.0
        self._verbs: Mapping[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 9: self._mkdir, 10: self._unlink, 11: self._rmdir,
            12: self._rename, 14: self._open, 15: self._read, 16: self._write, 17: self._statfs, 18: self._release,
            20: self._nothing, 25: self._nothing, 26: self._init, 27: self._nothing_open, 28: self._readdir,
            29: self._nothing, 30: self._nothing, 34: self._nothing, 35: self._create, 45: self._rename2,
        }  # fmt: skip

    def serve(self) -> None:
        """Answer until the filesystem is unmounted."""
        while True:
            try:
                request = os.read(self._device, LONGEST + 8192)
            except OSError:
                return
            _, kind, unique, node, *_ = HEADER.unpack_from(request)
            if kind not in UNANSWERED:
                self._answer(kind, unique, node, request[HEADER.size :])

    def _answer(self, kind: int, unique: int, node: int, request: bytes) -> None:
        error, body = 0, b""
        try:
            verb = self._verbs.get(kind)
            error = -errno.ENOSYS if verb is None else 0
            body = verb(node, request) if verb else b""
        except OSError as failure:
            error = -(failure.errno or errno.EIO)
        os.write(self._device, ANSWER.pack(ANSWER.size + len(body), error, unique) + body)

    # -- names

    def _place(self, node: int, name: str = "") -> Path:
        return self._backing / self._paths[node] / name

    def _number(self, path: Path) -> int:
        name = str(path.relative_to(self._backing))
        number = next((number for number, known in self._paths.items() if known == name), 0)
        number = number or max(self._paths) + 1
        self._paths[number] = name
        return number

    def _forget(self, path: Path) -> None:
        name = str(path.relative_to(self._backing))
        self._paths = {number: f"{known}\0" if known == name else known for number, known in self._paths.items()}

    def _entry(self, path: Path) -> bytes:
        status = path.lstat()
        return struct.pack("=4Q2I", self._number(path), 0, 0, 0, 0, 0) + _attributes(status)

    # -- verbs

    def _init(self, _node: int, _request: bytes) -> bytes:
        return struct.pack("=IIIIHHI", 7, 22, 0, BIG_WRITES, 1, 1, LONGEST)

    def _nothing(self, _node: int, _request: bytes) -> bytes:
        return b""

    def _nothing_open(self, _node: int, _request: bytes) -> bytes:
        return struct.pack("=QII", 0, 0, 0)

    def _lookup(self, node: int, request: bytes) -> bytes:
        return self._entry(self._place(node, _names(request)[0]))

    def _getattr(self, node: int, _request: bytes) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + _attributes(self._place(node).lstat())

    def _setattr(self, node: int, request: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", request)
        mode, _, owner, group = struct.unpack_from("=4I", request, 68)
        path = self._place(node)
        if valid & MODE:
            path.chmod(stat.S_IMODE(mode))
        if valid & (OWNER | GROUP):
            os.chown(path, owner if valid & OWNER else -1, group if valid & GROUP else -1)
        if valid & SIZE:
            os.truncate(path, size)
        return self._getattr(node, request)

    def _mkdir(self, node: int, request: bytes) -> bytes:
        path = self._place(node, _names(request[8:])[0])
        path.mkdir(mode=stat.S_IMODE(struct.unpack_from("=I", request)[0]))
        return self._entry(path)

    def _unlink(self, node: int, request: bytes) -> bytes:
        path = self._place(node, _names(request)[0])
        path.unlink()
        self._forget(path)
        return b""

    def _rmdir(self, node: int, request: bytes) -> bytes:
        path = self._place(node, _names(request)[0])
        path.rmdir()
        self._forget(path)
        return b""

    def _rename(self, node: int, request: bytes, names_at: int = 8) -> bytes:
        old, new = _names(request[names_at:])
        source, target = self._place(node, old), self._place(struct.unpack_from("=Q", request)[0], new)
        number = self._number(source)
        source.rename(target)
        self._forget(target)
        self._paths[number] = str(target.relative_to(self._backing))
        return b""

    def _rename2(self, node: int, request: bytes) -> bytes:
        return self._rename(node, request, names_at=16)

    def _open(self, node: int, request: bytes) -> bytes:
        return self._opened(self._place(node), struct.unpack_from("=I", request)[0], 0)

    def _create(self, node: int, request: bytes) -> bytes:
        flags, mode = struct.unpack_from("=II", request)
        path = self._place(node, _names(request[16:])[0])
        opened = self._opened(path, flags | os.O_CREAT, stat.S_IMODE(mode))
        return self._entry(path) + opened

    def _opened(self, path: Path, flags: int, mode: int) -> bytes:
        flags = flags & ~(os.O_DIRECT | os.O_NOFOLLOW | os.O_APPEND)
        return struct.pack("=QII", os.open(path, flags | os.O_CLOEXEC, mode), 0, 0)

    def _release(self, _node: int, request: bytes) -> bytes:
        os.close(struct.unpack_from("=Q", request)[0])
        return b""

    def _read(self, _node: int, request: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", request)
        return os.pread(handle, size, offset)

    def _write(self, _node: int, request: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", request)
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / self.rate
        if self._free_at > now:
            time.sleep(self._free_at - now)
        return struct.pack("=II", os.pwrite(handle, request[40 : 40 + size], offset), 0)

    def _statfs(self, _node: int, _request: bytes) -> bytes:
        found = os.statvfs(self._backing)
        figures = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("=5Q4I24x", *figures, found.f_bsize, 255, found.f_frsize, 0)

    def _readdir(self, node: int, request: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", request)
        answer = b""
        for number, name in enumerate(sorted(path.name for path in self._place(node).iterdir()), 1):
            encoded = os.fsencode(name)
            entry = struct.pack("=QQII", number + ROOT, number, len(encoded), 0) + encoded
            entry += bytes(-len(entry) % 8)
            if number > offset and len(answer) + len(entry) <= size:
                answer += entry
        return answer


def _names(request: bytes) -> list[str]:
    return [os.fsdecode(name) for name in request.split(b"\0")[:-1]]


def _attributes(status: os.stat_result) -> bytes:
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return struct.pack(
        "=6Q10I",
        status.st_ino, status.st_size, status.st_blocks, *(one // 10**9 for one in times),
        *(one % 10**9 for one in times), status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0,
    )  # fmt: skip


@contextmanager
def slow_filesystem(place: Path, backing: Path, rate: float) -> Iterator[SlowFilesystem]:
    """Mount one at the directory `place`, which shows the directory `backing`; `rate` is in bytes a second."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    filesystem = SlowFilesystem(device, backing, rate)
    serving = threading.Thread(target=filesystem.serve, name="slow-filesystem")
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        syscalls.mount("fuse", str(place), "fuse", 0, options)
        serving.start()
        yield filesystem
    finally:
        filesystem.rate = float("inf")
        syscalls.umount(str(place), DETACH)
        serving.join(10)
        os.close(device)


def main() -> None:
    """Mount one until stdin ends, for a test in other namespaces: arguments are place, backing and rate."""
    place, backing, rate = sys.argv[1:]
    for directory in map(Path, (place, backing)):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with slow_filesystem(Path(place), Path(backing), float(rate)):
        print("mounted", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
