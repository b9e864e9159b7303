"""Restores while the image arrives, against the slower of its two parts alone, alternating in one run.

    tests/lab/run trixie -- /opt/kybernate/bin/python -m tests.bench.streaming --mib 4096

A container with random bytes on a pretended GPU is restored until it computes: from an S3 server of this machine, from
which it arrives in memory meanwhile, and from a disk whose cache is cold. The parts alone are the transfer (`kybernate
store get` into memory, or reading the files) and a restore of the same image from memory. With `--arena`, its VRAM goes
through the node's arena. Prints a table and appends a line of JSON per figure to build/bench.jsonl: medians in seconds,
`stock` is the larger of the two medians of the parts, `bar` the highest ratio that is good enough. Exit status 1 if one
is above its bar.

The pretended GPUs have their memory on a tmpfs of huge pages, since a GPU has no faults of small ones. Their driver,
which copies in one thread, is no faster than a real one then (0.12 to 0.3 s for a GiB); the steps below show it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.figures import HEADING, Figure, record, row, seconds
from tests.bench.free_memory import free_memory_kept
from tests.bench.page_cache import evict
from tests.contract.store.servers import ACCESS, BUCKET, SECRET, rclone
from tests.fakes.cuda import Gpus
from tests.gpu.host_memory import touch_what_is_there
from tests.system import gpu
from tests.system.checkpoints import PYTHON, kybernate
from tests.system.ctr import Ctr, eventually

BAR = 1.15
AGENT = Path("/etc/kybernate/agent.toml")
PROCESSOR = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage")
PAYLOAD = """
import ctypes, os, sys, time
cuda, size, piece = ctypes.CDLL("libcuda.so.1"), int(sys.argv[1]) << 20, 2 << 20
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: {result}"
context, memory, word = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
block = bytearray(os.urandom(piece))
for offset in range(0, size, piece):
    block[:8] = offset.to_bytes(8, "little")
    source = (ctypes.c_char * piece).from_buffer(block)
    call("cuMemcpyHtoD_v2", ctypes.c_uint64(memory.value + offset), source, ctypes.c_size_t(piece))
del source, block
while True:
    for offset in range(0, size, piece):
        call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(memory.value + offset), ctypes.c_size_t(8))
        assert word.value == offset, f"{word.value} at {offset}"
    print("right", flush=True)
    time.sleep(0.02)
"""


@dataclass
class Bench:
    """An image in a store, on a disk and in memory, and the seconds of each way so far."""

    ctr: Ctr
    area: Path  # on a disk
    memory: Path  # a tmpfs
    name: str
    variant: str  # ends the names of the figures
    touched: int  # bytes of memory that are touched before each part
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    processor: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of the whole node

    def round(self) -> None:
        self._restore("streamed", "--from", "store", self.name)
        self._timed("transfer", lambda: kybernate("store", "get", self.name, str(self.memory / "got"), timeout=600))
        shutil.rmtree(self.memory / "got")
        shutil.copytree(self.area / "image", self.memory / "image")
        self._restore("from ram", str(self.memory / "image"))
        shutil.rmtree(self.memory / "image")
        evict(self.area / "image")
        self._restore("from disk", str(self.area / "image"))
        evict(self.area / "image")
        self._timed("reading", lambda: subprocess.run(f"cat {self.area}/image/* > /dev/null", shell=True, check=True))

    def _restore(self, way: str, *image: str) -> None:
        """Time a restore until the program has found its memory right for the first time."""
        id, log = self.ctr.new_id("bench"), self.area / "log"
        log.unlink(missing_ok=True)

        def restore() -> None:
            answer = kybernate("restore", *image, "--name", id, "--detach", "--log", str(log), "--json", timeout=600)
            self._note(way, json.loads(answer)["steps"])
            eventually(lambda: log.exists() and "right" in log.read_text(), seconds=60, pause=0.005)

        try:
            self._timed(way, restore)
        finally:
            self.ctr.remove(id)

    def _note(self, way: str, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            self.steps[f"{way}: {step['name']}"].append(step["seconds"])

    def _timed(self, way: str, work: Callable[[], object]) -> None:
        touch_what_is_there(self.touched)  # what the parts before this one have freed may have gone to the host
        before = _processor_seconds()
        self.seconds[way].append(seconds(work))
        self.processor[f"{way}: of the processor"].append(_processor_seconds() - before)

    def figures(self, lane: str) -> list[Figure]:
        return [
            self._figure("restore.streamed.s3", lane, "streamed", "transfer"),
            self._figure("restore.disk.cold", lane, "from disk", "reading"),
        ]

    def _figure(self, name: str, lane: str, way: str, part: str) -> Figure:
        alone = max(median(self.seconds[one]) for one in (part, "from ram"))
        times = self.seconds[way]
        return Figure(f"{name}{self.variant}", lane, median(times), alone, "s", BAR, len(times))


def _processor_seconds() -> float:
    """Return what all of this node has used: other work on the machine does not count."""
    return int(PROCESSOR.read_text()) / 1e9


@contextmanager
def gpus(mib: int, *, arena: bool) -> Iterator[None]:
    """Have a node with GPUs whose memory is made of huge pages, and an arena for as much, or none."""
    with ExitStack() as stack:
        if arena:
            stack.enter_context(gpu.node_with_arena(mib << 20))
        else:
            gpu.install_driver()
            stack.callback(gpu.remove_driver)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=always,mode=0777", "gpus", gpu.GPUS], check=True)
        stack.callback(subprocess.run, ["umount", gpu.GPUS], check=True)
        stack.callback(gpu.forget_helper)
        made = Gpus.create(gpu.GPUS, size=2 * (mib + 512) << 20)
        (made.directory / "vram").mkdir()
        (made.directory / "vram").chmod(0o777)
        gpu.forget_helper()  # of the GPUs that there were before
        yield


@contextmanager
def prepared(mib: int, area: Path, memory: Path, *, arena: bool = False) -> Iterator[Bench]:
    """Have a node with a GPU, a store, and an image in it."""
    with gpus(mib, arena=arena), _stored(mib, area, arena=arena) as ctr:
        yield Bench(ctr, area, memory, "image", ".arena" if arena else "", 9 * mib << 18)


@contextmanager
def _stored(mib: int, area: Path, *, arena: bool) -> Iterator[Ctr]:
    """Have a store, and the image in it and in `area`."""
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    (area / "server").mkdir()
    ctr, log = Ctr(), area / "source"
    with rclone(area / "server") as server:
        AGENT.parent.mkdir(exist_ok=True)
        AGENT.write_text(f'[store]\nurl = "s3://{BUCKET}/bench"\nendpoint = "{server.endpoint}"\n')
        kybernate("store", "init")
        own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
        flags = ["--log-uri", f"file://{log}", *gpu.mounts(), *gpu.visible(0)]
        flags += ["--annotation", "kybernate.io/arena=true"] if arena else []
        with own.running("python3", "-c", PAYLOAD, str(mib), id=ctr.new_id("source"), flags=flags) as id:
            eventually(lambda: log.exists() and "right" in log.read_text(), seconds=600)
            kybernate("checkpoint", id, str(area / "image"), "--exit", timeout=600)
        kybernate("store", "put", str(area / "image"), timeout=600)
        yield ctr


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.streaming", description=__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="of VRAM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lane", default="trixie")
    parser.add_argument("--arena", action="store_true", help="let VRAM go through the node's arena")
    wanted = parser.parse_args()
    with ExitStack() as stack:
        stack.enter_context(free_memory_kept())  # huge pages take it first, and only what arrives is in such
        area = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        touch_what_is_there(6 * wanted.mib << 20)  # or huge pages are such as wait for the host of a virtual machine
        bench = stack.enter_context(prepared(wanted.mib, area, memory, arena=wanted.arena))
        for number in range(wanted.rounds + 1):
            bench.round()
            if number == 0:
                for times in (bench.seconds, bench.steps, bench.processor):
                    times.clear()  # caches have filled
        for way, values in (bench.seconds | bench.processor | bench.steps).items():
            print(f"{way:28} {median(values):8.2f} s   {' '.join(f'{one:.2f}' for one in values)}")
        figures = bench.figures(wanted.lane)
    print(HEADING)
    for figure in figures:
        print(row(figure))
    record(figures)
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
