"""Measure the data path for VRAM bytes on plain memory, against CRIU's own, in one run and alternating.

    tests/lab/run trixie -- /opt/kybernate/bin/python -m tests.bench.data_path

A process with some GiB of private memory is restored and dumped on a tmpfs, in turn by CRIU alone (stock) and with its
bytes moved in parallel with CRIU (ours); every round compares digests. Then the copies alone with 1 to 16 threads.
Prints a table and appends a line of JSON per figure to build/bench.jsonl: medians in seconds, `ratio` is ours to stock,
`bar` the highest ratio that is good enough. Exit status 1 if one is above its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from kybernate_shim.linux.prctl import become_subreaper
from kybernate_shim.linux.process_memory import Region
from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.vram_io.thread_pool import CopyOptions
from kybernate_shim.vram_mover.load import load
from kybernate_shim.vram_mover.save import move_out, save

GIB = 1 << 30
BLOCK = 16 << 20
THREADS = (1, 2, 4, 8, 16)
PAYLOAD = f"""
import ctypes, mmap, os, sys, time
size = int(sys.argv[1])
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block = bytearray(os.urandom({BLOCK}))
for offset in range(0, size, {BLOCK}):
    block[:8] = offset.to_bytes(8, "little")
    area[offset:offset + {BLOCK}] = block
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
with open(sys.argv[2] + ".new", "w") as file:
    file.write(str(start))
os.rename(sys.argv[2] + ".new", sys.argv[2])
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True)
class Figure:
    """One line of build/bench.jsonl."""

    name: str
    lane: str
    ours: float
    stock: float
    unit: str
    ratio: float
    bar: float
    n: int

    @property
    def good(self) -> bool:
        return self.ratio <= self.bar


class Bench:
    """The process, its images on a tmpfs, and the seconds of every step so far."""

    def __init__(self, area: Path, size: int, how: CopyOptions) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._area = area
        self._how = how
        self._full, self._small = area / "full", area / "small"
        self._pid = _start_payload(area, size)
        start = int(_awaited(area / "address"))
        self._region = Region(start, start + size, "rw-p", 0, "")
        self._dump_stock()
        self._saved = self._dump_ours()
        self._digest = self._saved[0].digest

    def round(self) -> None:
        """Restore and dump once by each of the two ways."""
        self._timed("stock restore", lambda: self._criu("restore", self._full))
        self._kill()
        self._timed("ours restore: criu", lambda: self._criu("restore", self._small))
        self._timed("ours restore: load", lambda: load(self._pid, self._saved, self._area, self._how))
        self._dump_stock()
        self._saved = self._dump_ours()
        if self._saved[0].digest != self._digest:
            raise SystemExit("the process came back with other bytes")

    def scale(self, threads: int) -> None:
        """Save and load once with so many threads; the process is there only meanwhile."""
        self._criu("restore", self._small)
        how = CopyOptions(threads=threads, piece_bytes=self._how.piece_bytes)
        self._timed(f"load {threads}", lambda: load(self._pid, self._saved, self._area, how))
        self._timed(f"save {threads}", lambda: save(self._pid, [self._region], self._area, ["scaled"], how))
        (self._area / "scaled").unlink()
        self._kill()

    def forget_full(self) -> None:
        """Free the memory that CRIU's full images take."""
        shutil.rmtree(self._full)

    def _dump_stock(self) -> None:
        _emptied(self._full)
        self._timed("stock dump", lambda: self._criu("dump", self._full, "--leave-running"))

    def _dump_ours(self) -> list[SavedRegion]:
        """The process is gone afterwards."""
        (self._area / "vram").unlink(missing_ok=True)
        _emptied(self._small)
        saved: list[SavedRegion] = []
        files, parts = ["vram"], list[SavedRegion]()
        self._timed(
            "ours dump: save",
            lambda: saved.extend(move_out(self._pid, [self._region], self._area, files, parts.append, self._how)),
        )
        self._timed("ours dump: criu", lambda: self._criu("dump", self._small))
        _await_end(self._pid)
        return saved

    def _criu(self, verb: str, images: Path, *options: str) -> None:
        what = ["--tree", str(self._pid)] if verb == "dump" else ["--restore-detached"]
        done = subprocess.run(
            ["criu", verb, *what, *options, "--images-dir", images, "--log-file", f"{verb}.log", "-v2"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            tail = (images / f"{verb}.log").read_text().splitlines()[-20:]
            raise SystemExit("\n".join([f"criu {verb} ended with {done.returncode}", done.stderr, *tail]))

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        _await_end(self._pid)

    def _timed(self, name: str, step: Callable[[], object]) -> None:
        begin = time.monotonic()
        step()
        self.seconds[name].append(time.monotonic() - begin)

    def middle(self, name: str) -> float:
        """Return a step's median; the first dumps, which met a cold machine, do not count."""
        found = self.seconds[name]
        return median(found[1:] if len(found) > 1 and "dump" in name else found)

    def count(self, name: str) -> int:
        return len(self.seconds[name])


def main() -> int:
    arguments = _arguments()
    size = max(1, round(arguments.gib * GIB / BLOCK)) * BLOCK  # the payload fills whole blocks
    how = CopyOptions(threads=arguments.threads) if arguments.threads else CopyOptions()
    if arguments.piece_mib:
        how = CopyOptions(threads=how.threads, piece_bytes=arguments.piece_mib << 20)
    become_subreaper()  # what CRIU restores becomes ours, and ends with us
    with _tmpfs(3 * size + GIB) as area:
        bench = Bench(area, size, how)
        for _ in range(arguments.rounds):
            bench.round()
        bench.forget_full()
        for _ in range(arguments.scaling_rounds):
            for threads in THREADS:
                bench.scale(threads)
    figures = [*_against_criu(bench, arguments.lane, how), *_scaling(bench, arguments.lane)]
    _show(figures, bench, size)
    _append(arguments.output, figures)
    return 0 if all(figure.good for figure in figures) else 1


def _against_criu(bench: Bench, lane: str, how: CopyOptions) -> Iterator[Figure]:
    """Compare the moving of the bytes alone, where CRIU's is what the bytes add to its restore, and the whole."""
    middle, rounds = bench.middle, bench.count("stock restore")
    bytes_stock = middle("stock restore") - middle("ours restore: criu")
    whole = middle("ours restore: criu") + middle("ours restore: load")
    dump = middle("ours dump: save") + middle("ours dump: criu")
    for name, ours, stock, bar in (
        (f"data-path restore rate, {how.threads} threads", middle("ours restore: load"), bytes_stock, 1 / 1.3),
        ("data-path restore with criu", whole, middle("stock restore"), 1.0),
        ("data-path dump with criu", dump, middle("stock dump"), 1.0),
    ):
        yield Figure(name, lane, round(ours, 4), round(stock, 4), "s", round(ours / stock, 3), round(bar, 3), rounds)


def _scaling(bench: Bench, lane: str) -> Iterator[Figure]:
    """Compare each number of threads with one thread; more than there are CPUs must at least not harm."""
    for verb in ("load", "save"):
        one = bench.middle(f"{verb} 1")
        for threads in THREADS[1:]:
            ours = bench.middle(f"{verb} {threads}")
            n = bench.count(f"{verb} {threads}")
            name = f"data-path {verb}, {threads} threads to one"
            yield Figure(name, lane, round(ours, 4), round(one, 4), "s", round(ours / one, 3), 1.25, n)


def _show(figures: list[Figure], bench: Bench, size: int) -> None:
    for name, seconds in bench.seconds.items():
        print(f"{name:20} {bench.middle(name):8.3f} s   of {' '.join(f'{each:.2f}' for each in seconds)}")
    print(f"\n{size / GIB:g} GiB, {len(os.sched_getaffinity(0))} CPUs, {platform.release()}")
    for figure in figures:
        verdict = "ok" if figure.good else "ABOVE ITS BAR"
        print(
            f"{figure.name:40} {figure.ours:8.3f} {figure.stock:8.3f} {figure.unit} "
            f"{figure.ratio:6.2f} (bar {figure.bar:.2f}) {verdict}"
        )


def _append(path: Path, figures: list[Figure]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(figure)) + "\n" for figure in figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=4, help="size of the process's memory (4)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds against CRIU (7)")
    parser.add_argument("--scaling-rounds", type=int, default=3, help="rounds of each number of threads (3)")
    parser.add_argument("--threads", type=int, default=0, help="threads against CRIU (one for each CPU, at most 16)")
    parser.add_argument("--piece-mib", type=int, default=0, help="size of a piece (the data path's own)")
    parser.add_argument("--lane", default=_codename(), help="name of this machine in the figures (the suite's)")
    parser.add_argument("--output", type=Path, default=Path("build/bench.jsonl"))
    return parser.parse_args()


def _codename() -> str:
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")


@contextmanager
def _tmpfs(size: int) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="data-path-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()


def _start_payload(area: Path, size: int) -> int:
    return subprocess.Popen(
        [sys.executable, "-ES", "-c", PAYLOAD, str(size), area / "address"],
        start_new_session=True,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ).pid


def _awaited(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"no {path} after 120 s")
        time.sleep(0.01)
    return path.read_text()


def _await_end(pid: int) -> None:
    """Reap a process, ours by birth or as its subreaper, so that its pid is free for the next restore."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def _emptied(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


if __name__ == "__main__":
    sys.exit(main())
