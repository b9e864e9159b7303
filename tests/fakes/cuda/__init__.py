"""A pretended CUDA driver for machines without a GPU, and the directory that stands for their GPUs.

A test double: see abi.h for what it promises, switches.h for how it is made to fail. Programs that load
`libcuda.so.1` or `libnvidia-ml.so.1` use it when LD_LIBRARY_PATH names the folder that `build()` returns.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import add
from pathlib import Path

from tests.fakes.cuda.build import build

__all__ = ["GIB", "Call", "Gpus", "build", "bytes_held", "gpu_uuid"]

GIB = 1 << 30
_MAX_GPUS = 16
_PAGE = 4096
_ACCOUNT_MAGIC = 0x46414B4544415256  # of an account, as in gpus.c


@dataclass(frozen=True)
class Call:
    """A recorded call: who made it, in which thread, and which process a verb was for, 0 for a function."""

    pid: int
    thread: str
    name: str
    target: int


@dataclass(frozen=True)
class Gpus:
    """The state directory of a pretended machine: its GPUs, what they hold, and the switches that make them fail.

    Containers see the same GPUs when the directory is mounted at /run/fake-cuda.
    """

    directory: Path

    @classmethod
    def create(
        cls, directory: Path, *, count: int = 2, size: int = 8 * GIB, model: str = "Pretended H200", seed: int = 0
    ) -> Gpus:
        """Make `count` GPUs of `size` bytes. Another `seed` gives other UUIDs, as another node has."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "held").mkdir(exist_ok=True)
        lines = (f"{gpu_uuid(index, seed)} {size} {model}\n" for index in range(count))
        (directory / "gpus").write_text("".join(lines))
        for path in (directory, directory / "held"):
            path.chmod(0o777)  # a container's user is not root
        return cls(directory)

    @property
    def uuids(self) -> list[str]:
        return [line.split()[0] for line in (self.directory / "gpus").read_text().splitlines()]

    def used(self) -> list[int]:
        """Bytes in use per GPU, counting living processes only."""
        totals = [0] * _MAX_GPUS
        for sizes in self.held().values():
            totals = list(map(add, totals, sizes))
        return totals[: len(self.uuids)]

    def held(self) -> dict[str, tuple[int, ...]]:
        """Bytes per GPU by the account of each process, all zero of a dead one.

        Under the lock of the accounts: one that is just being opened could not lock itself, and would stay empty.
        """
        with suppress(FileNotFoundError), (self.directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return {path.name: bytes_held(path) for path in (self.directory / "held").iterdir()}
        return {}

    def used_by(self, pid: int) -> list[int]:
        """Bytes in use per GPU by one process."""
        totals = [0] * _MAX_GPUS
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # one that it has closed
                if "/held/" in str(file.readlink()):
                    totals = list(map(add, totals, bytes_held(file)))
        return totals[: len(self.uuids)]

    def free(self, gpu: int) -> int:
        """Bytes of a GPU that nothing uses."""
        return int((self.directory / "gpus").read_text().splitlines()[gpu].split()[1]) - self.used()[gpu]

    def switch(self, switches: str) -> None:
        """Make verbs fail or hang, such as "checkpoint:2:999,lock:*:hang@1234"; "" switches all of that off."""
        self._write("fail", switches)

    def record(self) -> None:
        """From now on, write down every call of a verb or of one of the driver's functions."""
        self._write("calls", "")
        (self.directory / "calls").chmod(0o666)

    def recorded(self) -> list[Call]:
        """Return what was called since `record`, and end that."""
        path = self.directory / "calls"
        return _calls(path.rename(path.with_suffix(".ended")))

    def calls(self) -> list[Call]:
        """Return what was called since `record` until now."""
        return _calls(self.directory / "calls")

    @contextmanager
    def occupied(self, gpu: int, *, leaving: int) -> Iterator[None]:
        """Hold the memory of a GPU, all but so many bytes of what is free now, as another program may."""
        held = [0] * _MAX_GPUS
        held[gpu] = max(0, self.free(gpu) - leaving)
        path = self.directory / "held" / "occupied"
        with (self.directory / "held.new").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(struct.pack(f"Q{_MAX_GPUS}Q", _ACCOUNT_MAGIC, *held).ljust(_PAGE, b"\0"))
            file.flush()
            Path(file.name).rename(path)
            try:
                yield
            finally:
                path.unlink()

    def slow(self, seconds_per_gib: float) -> None:
        self._write("seconds-per-gib", str(seconds_per_gib))

    def missing(self, *calls: str) -> None:
        """Take these calls out of the driver."""
        self._write("missing", "\n".join(calls))

    def driver(self, api: int, version: str) -> None:
        self._write("driver", f"{api} {version}")

    def hide_holders(self) -> None:
        """Let NVML name no processes, as in a container or on a virtual GPU."""
        self._write("hidden", "1")

    def load(self, *samples: tuple[int, int, int]) -> None:
        """Let NVML have these samples of every GPU: pid, microseconds, percent."""
        self._write("load", "".join(f"{pid} {time} {percent}\n" for pid, time, percent in samples))

    def connect(self, *links: tuple[int, int, str]) -> None:
        """Let NVML report how pairs of GPUs are connected: "NV4", "PIX", "PXB", "PHB" or "NODE"; others are "SYS"."""
        self._write("topology", "".join(f"{one} {other} {path}\n" for one, other, path in links))

    def split(self) -> None:
        """Switch the GPUs to MIG mode."""
        self._write("mig", "1")

    def limits(self) -> list[tuple[str, str, int, int]]:
        """Return the limits of memory that were set through NVML: UUID, cgroup, soft limit, hard limit."""
        path = self.directory / "limits"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(uuid, cgroup, int(soft), int(hard)) for uuid, cgroup, soft, hard in words]

    def environment(self, libraries: Path) -> dict[str, str]:
        """What a program on this machine needs in its environment to use the GPUs."""
        return {"LD_LIBRARY_PATH": str(libraries), "FAKE_CUDA_DIR": str(self.directory)}

    def _write(self, name: str, text: str) -> None:
        new = self.directory / f"{name}.new"  # never a half-written switch
        new.write_text(text)
        new.rename(self.directory / name)


def gpu_uuid(index: int, seed: int = 0) -> str:
    return f"GPU-{seed:08x}-0000-4000-8000-{index + 1:012x}"


def _calls(path: Path) -> list[Call]:
    words = [line.split(maxsplit=3) for line in path.read_text().splitlines()]
    return [Call(int(pid), thread, name, int(target)) for pid, name, target, thread in words]


def bytes_held(path: Path) -> tuple[int, ...]:
    """Read the bytes per GPU of one process, all zero when it is dead (gpus.h describes the file)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return (0,) * _MAX_GPUS
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return struct.unpack(f"{_MAX_GPUS}Q", os.pread(fd, 8 * _MAX_GPUS, 8))
    else:
        return (0,) * _MAX_GPUS
    finally:
        os.close(fd)
