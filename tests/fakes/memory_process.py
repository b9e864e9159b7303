"""A process whose memory tests look at and change: it evaluates the Python that it is sent, in threads where asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from kybernate_shim.linux.process_memory import Region, read_maps
from kybernate_shim.linux.ptrace.seized import DEADLINE, SeizedProcess, drop_pages_of
from kybernate_shim.vram_io.saved_regions import SavedRegion

LOOP = """
import ctypes, hashlib, mmap, os, random, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
maps = {}
def new(name, size, huge=False):
    maps[name] = area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return where(name)
def where(name):
    return ctypes.addressof(ctypes.c_char.from_buffer(maps[name]))
def fill(name, start, end, seed):
    maps[name][start:end] = random.Random(seed).randbytes(end - start)
def digest(name):
    return hashlib.blake2b(maps[name]).hexdigest()
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except BaseException as error:
        print(repr("failed: " + repr(error)), flush=True)
"""


class MemoryProcess:
    """A running process of that kind; it is killed when the context ends."""

    def __init__(self, *prefix: str) -> None:
        argv = [*prefix, sys.executable, "-ES", "-c", LOOP]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready\n"
        self.pid = self._process.pid

    def __enter__(self) -> MemoryProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, expression: str) -> Any:
        """Evaluate `expression` in the process and return the result, if it is a literal."""
        self.tell(expression)
        return self.answer()

    def tell(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return ast.literal_eval(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with status {self._process.wait()}"
        return line

    def region(self, name: str, size: int, *, huge: bool = False) -> Region:
        """Map `size` bytes of private anonymous memory in the process, all zero."""
        start = self.ask(f"new({name!r}, {size}, {huge})")
        return Region(start, start + size, "rw-p", 0, "")

    def map_populated(self, name: str, size: int) -> Region:
        """Map such memory with all of its pages, and return the mapping that it is in."""
        flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE"
        self.ask(f"maps.update({{{name!r}: mmap.mmap(-1, {size}, flags={flags})}})")
        start = self.ask(f"where({name!r})")
        return next(one for one in read_maps(self.pid) if one.start <= start < one.end)

    def fill(self, name: str, start: int, end: int, *, seed: int = 1) -> None:
        assert self.ask(f"fill({name!r}, {start}, {end}, {seed})") is None

    def drop(self, saved: Iterable[SavedRegion]) -> None:
        """Give the pages of these regions back to the kernel."""
        for region in saved:
            drop_pages(self.pid, region.start, region.size)

    def digest(self, name: str) -> str:
        return str(self.ask(f"digest({name!r})"))

    def resident_kib(self, region: Region, field: str = "Rss") -> int:
        """Return a figure of /proc/PID/smaps, summed over the mappings within `region`."""
        total, inside = 0, False
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(word, 16) for word in head.split("-"))
                inside = low >= region.start and high <= region.end
            elif inside and head == f"{field}:":
                total += int(line.split()[1])
        return total


def drop_pages(pid: int, start: int, size: int, *, seconds: float = DEADLINE) -> None:
    """Hold process `pid`, and give the pages of a range back to the kernel. Raises InjectionFailed."""
    with SeizedProcess(pid, seconds=seconds) as held:
        drop_pages_of(held, pid, start, size)
