"""One container after the other on a real GPU: started, checkpointed, restored and measured, for tests/gpu/bench."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.gpu.bench_figures import GIB, PAGES, Measured
from tests.gpu.host_memory import used
from tests.gpu.machine import IMAGE, mounts
from tests.gpu.scenarios import Bench

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
START_SECONDS = 300
POLL_SECONDS = 0.02
NAME = "bench"
SETTINGS = """runtime = "runc"
verify = false
log_file = "{log}"
[gpu]
data_path = "{way}"
huge_pages = "{pages}"
"""
POOL_SETTING = 'image_pool = "{pool}"\nimage_pool_files = ["{mib}MiB"]\n'
ARENA_SETTING = 'arena = "{mib}MiB"\n'


@dataclass(frozen=True)
class Rounds:
    """So many that are measured, after so many that do not count; each is its number, and whether it counts."""

    measured: int
    warm_up: int

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        return ((number, number >= self.warm_up) for number in range(self.warm_up + self.measured))


@dataclass
class Cycle:
    """One container after the other on one node, each restored from the image of the one before."""

    bench: Bench
    memory: Path
    measured: Measured
    name: str = NAME
    flags: Sequence[str] = ()
    number: int = 0

    @property
    def log(self) -> Path:
        return self.bench.images / f"{self.name}.log"

    @property
    def shim_log(self) -> Path:
        return self.bench.images / "shim.log"

    def settings(self, way: str, pages: str, *, arena: int = 0) -> None:
        text = SETTINGS.format(log=self.shim_log, way=way, pages=PAGES[pages][way])
        text += ARENA_SETTING.format(mib=arena >> 20) if arena else ""
        if pages == "pool" and way == "fast":
            text += POOL_SETTING.format(pool=self.memory / "pool", mib=of_process(self.bench.mib << 20) >> 20)
        Path("/etc/kybernate/shim.toml").write_text(text)

    def start(self, *flags: str, command: Sequence[str] = ("/never/run",)) -> float:
        """Run a container until it computes, and return the seconds."""
        self.number += 1
        before = self.log.read_text() if self.log.exists() else ""
        argv = ["ctr", "run", "-d", "--runtime", "io.containerd.kybernate.v1", "--log-uri", f"file://{self.log}"]
        begin = time.monotonic()
        self.bench.machine(
            *argv, *mounts(), *self.bench.flags, *self.flags, *flags, IMAGE, self.id, *command, seconds=START_SECONDS
        )
        await_until(lambda: _computes(self.log, len(before)), START_SECONDS)
        return time.monotonic() - begin

    @property
    def id(self) -> str:
        return f"{self.name}-{self.number}"

    def remove(self) -> None:
        machine = self.bench.machine
        machine("ctr", "task", "kill", "-s", "SIGKILL", "-a", self.id, status=None)
        await_until(self._gone, 60)
        machine("ctr", "container", "rm", self.id, status=None)

    def _gone(self) -> bool:
        self.bench.machine("ctr", "task", "rm", "-f", self.id, status=None)
        return self.id not in self.bench.machine("ctr", "task", "ls")

    def checkpoint(self, way: str, pages: str, image: Path, *, kept: bool = True) -> None:
        """Checkpoint the container that runs, which ends it."""
        if pages == "pool" and way == "fast":
            self.bench.kybernate("pool", "--fill")
        with Peak() as peak:
            answer = json.loads(
                self.bench.kybernate("checkpoint", self.id, str(image), "--no-rootfs", "--exit", "--json")
            )
        self.remove()
        manifest = json.loads((image / "kybernate-manifest.json").read_text())
        assert manifest["data_path"]["name"] == ("fast" if way == "arena" else way), manifest["data_path"]
        assert bool(manifest.get("arena")) == (way == "arena"), "the arena"
        if kept:
            steps = {step["name"]: step["seconds"] for step in answer["steps"]}
            self.measured.note(("checkpoint", way, pages), answer["seconds"], steps, peak.bytes)

    def restore(self, way: str, pages: str, image: Path, *, kept: bool = True) -> None:
        """Restore an image that was made `way`, and remove it."""
        began = time.time()
        with Peak() as peak:
            seconds = self.start("--annotation", f"kybernate.io/restore-from={image}")
        subprocess.run(["rm", "-r", image], check=True)
        if kept:
            self.measured.note(("restore", way, pages), seconds, self.steps_of_restore(began, seconds), peak.bytes)

    def in_place(self, pages: str, rounds: Rounds) -> None:
        """Suspend and resume, by ours and by the driver's bare calls, in turns; the first of each does not count."""
        for number, kept in rounds:
            for who in ("bare", "ours") if number % 2 else ("ours", "bare"):
                for verb in ("suspend", "resume"):
                    with Peak() as peak:
                        steps = self._by_driver(verb, pages) if who == "bare" else self._by_us(verb)
                    if kept:
                        self.measured.note((verb, who, pages), sum(steps.values()), steps, peak.bytes)
        computes_on(self.log)

    def _by_us(self, verb: str) -> dict[str, float]:
        answer = json.loads(self.bench.kybernate(verb, self.id, "--json"))
        return {step["name"]: step["seconds"] for step in answer["steps"]}

    def _by_driver(self, verb: str, pages: str) -> dict[str, float]:
        row = next(line for line in self.bench.machine("ctr", "task", "ls").splitlines() if line.startswith(self.id))
        with thp("always" if pages == "thp" else None):
            answer = json.loads(self.bench.kybernate("cuda", verb, "--pid", row.split()[1], "--json"))
        return {step["name"]: step["seconds"] for step in answer["steps"]}

    def steps_of_restore(self, began: float, seconds: float) -> dict[str, float]:
        """Return what the daemon reports of its steps, and what came before, between and after them."""
        lines = [json.loads(line) for line in self.shim_log.read_text().splitlines()]
        events = {line["event"]: line for line in lines if line.get("task") == self.id}
        created, restored = (
            datetime.fromisoformat(events[name]["time"]).timestamp() - began
            for name in ("task.created", "task.restored")
        )
        told = dict(events["task.restored"]["step_seconds"])
        between = restored - created - sum(told.values())
        return {"until it is created": created, **told, "between": between, "until it computes": seconds - restored}


def of_process(size: int) -> int:
    """Return about what a process has in VRAM whose payload is `size` bytes, in whole huge pages."""
    return (int(size * 1.03) + 3 * GIB // 4) >> 21 << 21


class Peak:
    """Samples the machine's memory in use; `bytes` is the most above what it was at first."""

    def __enter__(self) -> Peak:
        self.bytes, self._first = 0, used()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self.bytes = max(self.bytes, used() - self._first)


def _computes(log: Path, since: int) -> bool:
    text = log.read_text()[since:] if log.exists() else ""
    assert "wrong" not in text, text[-2000:]
    return "step " in text


def computes_on(log: Path) -> None:
    since = len(log.read_text())
    await_until(lambda: _computes(log, since), 60)


def await_until(look: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, f"not after {seconds:g} s"
        time.sleep(POLL_SECONDS)


@contextmanager
def thp(word: str | None) -> Iterator[None]:
    """Set the node's switch for huge pages, as we would, for a while."""
    if word is None:
        yield
        return
    before = re.findall(r"\[(\w+)\]", THP.read_text())[0]
    THP.write_text(word)
    try:
        yield
    finally:
        THP.write_text(before)


@contextmanager
def tmpfs(directory: Path, size: int) -> Iterator[Path]:
    """Keep images in memory, in huge pages: small ones cost a third more to write."""
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},huge=within_size", "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
