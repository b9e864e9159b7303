"""Starts programs that compute on the pretended GPUs and watches whether they continue with the right numbers."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from tests.fakes.cuda import Gpus
from tests.fakes.cuda.build import SOURCES
from tests.stillness import come_to_rest


class Program:
    """A running `computes` (or `computes.py`), which checks its own memory and prints a line per step."""

    def __init__(self, argv: list[str | Path], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._text = ""
        self.step = 0

    @classmethod
    def start(
        cls,
        gpus: Gpus,
        libraries: Path,
        *,
        mib: int = 2,
        pause_ms: int = 5,
        device: int = 0,
        busy_ms: int = 0,
        switches: str = "",
        python: bool = False,
        preload: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Program:
        """Start one and wait for its first step. `switches` stand in its own environment (see switches.h)."""
        program = [sys.executable, SOURCES / "computes.py"] if python else [libraries / "computes"]
        arguments = [mib, pause_ms, device] + ([] if python else [busy_ms])
        environment = dict(os.environ) | gpus.environment(libraries) | {"FAKE_CUDA_FAIL": switches}
        environment |= {"LD_PRELOAD": str(preload)} if preload else {}
        environment |= variables
        started = cls([*program, *map(str, arguments)], environment)
        started.wait_for_steps(1)
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_steps(self, count: int, *, seconds: float = 20.0) -> None:
        """Wait until `count` more steps have been computed; AssertionError when they do not come or are wrong."""
        until = time.monotonic() + seconds
        wanted = self._read() + count
        while self._read() < wanted:
            left = until - time.monotonic()
            assert left > 0, f"process {self.pid} stands still at step {self.step}"
            assert self._process.poll() is None, f"process {self.pid} ended with {self._process.returncode}"
            select.select([self._output], [], [], min(left, 0.5))

    def computes_on(self) -> None:
        """Assert that it continues, beyond what it may have printed before."""
        self._read()
        self.wait_for_steps(3)

    def stands_still(self, seconds: float = 0.2) -> None:
        """Assert that it computes nothing for a while, after the step that it may be in the middle of."""
        come_to_rest([self.pid])
        before = self._read()
        time.sleep(seconds)
        assert self._read() == before, f"process {self.pid} computes, {self.step - before} steps"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> int:
        """Take in what it has printed and return its last step."""
        try:
            while data := os.read(self._output, 65536):
                self._text += data.decode()
        except BlockingIOError:
            pass
        lines = self._text.split("\n")
        self._text = lines.pop()
        for line in lines:
            assert line.startswith("step "), f"process {self.pid}: {line}"
            self.step = int(line.split()[1])
        return self.step


class Asked:
    """A running program of this folder that is asked on its standard input, a line each, and answers by a line.

    `argv` begins with its file, or with -m and its package.
    """

    def __init__(
        self,
        gpus: Gpus,
        libraries: Path,
        argv: Sequence[str],
        preload: Path | None = None,
        *,
        switches: str = "",
    ) -> None:
        environment = dict(os.environ) | gpus.environment(libraries) | {"FAKE_CUDA_FAIL": switches}
        environment |= {"LD_PRELOAD": str(preload)} if preload else {}
        pipe = subprocess.PIPE
        script = argv if argv[0] == "-m" else [str(SOURCES / argv[0]), *argv[1:]]
        self._process = subprocess.Popen(
            [sys.executable, *script], env=environment, stdin=pipe, stdout=pipe, text=True, cwd=SOURCES.parents[2]
        )
        assert self._told() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, question: str) -> None:
        """Ask, but let `has_answered` tell of the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()

    def has_answered(self, seconds: float) -> bool:
        """Tell whether the answer to what was begun comes within so many seconds."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0]) and bool(self._told())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, question: str) -> str:
        """Ask, and return the answer; "" when the program has ended."""
        with suppress(BrokenPipeError):  # it has ended, and its last words can still be read
            self.begin(question)
        return self._told()

    def _told(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Holder(Asked):
    """A running `holds.py`: memory of a GPU, whose pieces of 2 MiB can be filled and read."""

    def __init__(
        self,
        gpus: Gpus,
        libraries: Path,
        pieces: int,
        preload: Path | None = None,
        *,
        allocations: int = 1,
        switches: str = "",
    ) -> None:
        super().__init__(gpus, libraries, ["holds.py", str(pieces), str(allocations)], preload, switches=switches)
        self._content = [0] * pieces

    def fill(self, piece: int, value: int) -> None:
        self._content[piece] = value
        self.ask(f"fill {piece} {value}")

    def renew(self) -> None:
        """Free all and allocate it again, with the same content."""
        self.ask("renew")
        for piece, value in enumerate(self._content):
            self.fill(piece, value)

    def do(self, step: str) -> None:
        """Have it do what needs no more than a word."""
        self.ask(step)

    def share(self) -> None:
        """Import memory, as from another process."""
        self.ask("share")

    def is_right(self) -> bool:
        """Tell whether its memory is what it was filled with."""
        return self.ask("content") == " ".join(map(str, self._content))


class Zoo(Asked):
    """A running `zoo`: the calls on device memory that programs make, once each or again and again."""

    def __init__(self, gpus: Gpus, libraries: Path, preload: Path | None = None) -> None:
        super().__init__(gpus, libraries, ["-m", "tests.fakes.cuda.zoo"], preload)

    def prepare(self, cases: Iterable[str]) -> None:
        assert self.ask(f"prepare {', '.join(cases)}") == "prepared"

    def call(self) -> None:
        """Have what is prepared called, in a thread each; do not wait for what the calls answer."""
        assert self.ask("call") == "called"

    def answers(self) -> dict[str, int]:
        """Return what the calls that have returned by now have answered, by case."""
        told = self.ask("answers")
        return {name: int(code) for name, _, code in (one.rpartition("=") for one in told.split(", ") if one)}

    def problem(self) -> str:
        """Return the first case whose call has not done what it should, and why; "" when all are right."""
        told = self.ask("check")
        return "" if told == "right" else told

    def loop(self, threads: int) -> None:
        """Begin to run random cases; from then on, whatever fails is an AssertionError of the next question."""
        told = self.ask(f"loop {threads}")
        assert told == "looping", told

    def count(self) -> int:
        """Return how many cases were run."""
        return self._counted("count")

    def stop(self) -> int:
        """Let the threads end, and return the same."""
        return self._counted("stop")

    def _counted(self, question: str) -> int:
        told = self.ask(question)
        assert told.isdigit(), told or "the program has ended"
        return int(told)
