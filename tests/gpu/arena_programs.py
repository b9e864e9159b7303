"""Programs with the preload library on a real GPU, and a CUDA helper whose arena their memory moves through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kybernate_shim.arena.memory import FOLDER
from kybernate_shim.checkpoint.gpu.room import KEPT_FREE
from kybernate_shim.gpu.errors import GpuPair
from kybernate_shim.gpu.helper_client import CudaHelper, log_path, start_helper
from kybernate_shim.gpu.sequence import Ahead, resume
from kybernate_shim.steps import Step

GIB = 1 << 30
DRIVERS_BYTES = 2 * GIB  # what a program has of a GPU that the arena does not take
START_SECONDS = 120
STEP_SECONDS = 30
STEPS = 5


@dataclass
class Program:
    """A running payload, which prints "step N" after each of its steps and reads its standard input."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(
        cls,
        argv: Sequence[str | Path],
        library: Path,
        folder: Path,
        name: str = "one",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Program:
        """Start a payload in Python, with what it is told on its command line, and by `variables`."""
        output = folder / f"{name}.out"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *argv],
                env={**os.environ, "LD_PRELOAD": str(library), **variables},
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        return cls(process, output)

    def wait_for_steps(self, count: int, seconds: float = STEP_SECONDS) -> None:
        """Wait until `count` more steps are done. Raises AssertionError, with what it has said."""
        wanted, until = self.step + count, time.monotonic() + seconds
        while self.step < wanted:
            self._wait_on(until)

    def wait_for_word(self, word: str, times: int, seconds: float = STEP_SECONDS) -> None:
        """Wait until it has said `word` so often, on a line of its own. Raises as `wait_for_steps`."""
        until = time.monotonic() + seconds
        while self.said(word) < times:
            self._wait_on(until)

    def said(self, word: str) -> int:
        return self._lines().count(word)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def change(self) -> None:
        """Have it change its share of the memory, and compute with that. Raises as `wait_for_steps`."""
        before = self.said("changed")
        self.process.send_signal(signal.SIGUSR1)
        self.wait_for_word("changed", before + 1)
        self.wait_for_steps(1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def step(self) -> int:
        steps = [line for line in self._lines() if line.startswith("step ")]
        return int(steps[-1].split()[1]) if steps else 0

    def _lines(self) -> list[str]:
        return self.output.read_text(errors="replace").split("\n")[:-1]

    def _wait_on(self, until: float) -> None:
        assert self.process.poll() is None, f"it ended: {self.output.read_text()[-2000:]}"
        assert time.monotonic() < until, f"it stands still: {self.output.read_text()[-500:]}"
        time.sleep(0.01)


@contextmanager
def node(gib: float, folder: Path, programs: int = 1, arena: Path = FOLDER) -> Iterator[Path]:
    """Run a CUDA helper with an arena, in a folder of that name, for so many programs of `gib`; yields its socket.

    Raises AssertionError, with the helper's log, where it cannot start.
    """
    socket = folder / "cuda.sock"
    size = int(gib * 1.1 + 2) * GIB * programs
    pid = start_helper(socket, options=["--arena", str(size), "--arena-folder", str(arena)])
    ended = 0
    try:
        while not socket.exists():
            ended, _ = os.waitpid(pid, os.WNOHANG)
            assert not ended, f"the helper ended: {log_path(socket).read_text()[-2000:]}"
            time.sleep(0.02)
        yield socket
    finally:
        if not ended:
            os.kill(pid, 15)
            os.waitpid(pid, 0)
        print("".join(f"  {line}\n" for line in log_path(socket).read_text().splitlines() if '"error"' in line), end="")
        subprocess.run(["umount", "--lazy", arena], check=False)  # a worker gives its memory back for a while


async def ahead(helper: CudaHelper, pid: int, taken: int, gpu: int = 0) -> Ahead:
    """Return what may be copied to `gpu` early of a program of which the arena has `taken` so many bytes."""
    found = (await helper.info()).gpus[gpu]
    return Ahead(pid, found.uuid, taken + DRIVERS_BYTES + found.total_bytes // KEPT_FREE)


async def resumed(helper: CudaHelper, pid: int, taken: int, pairs: Sequence[GpuPair] = (), gpu: int = 0) -> list[Step]:
    """Resume on `gpu` what the arena has `taken` so many bytes of; the last step returned is the whole."""
    began = time.monotonic()
    early = [await ahead(helper, pid, taken, gpu)] if taken else []
    steps = await resume(helper, [pid], pairs, ahead=early)
    return [*steps, Step("whole", time.monotonic() - began)]
