"""Takes one program of the zoo through its steps, in a container, and shows what became of each of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.gpu.machine import CHECKOUT
from tests.gpu.scenarios import ARENA, Bench, Container, container
from tests.gpu.zoo.table import Entry

PASSED, FAILED, NOT_REACHED, IMPOSSIBLE = "passed", "FAILED", "not reached", "not possible"
STILL_SECONDS = 0.2
REST_SECONDS = 20  # until a program needs the GPU again that works on what it has copied from it
LEFT_SECONDS = 30  # that a call has all the same after the deadline: what was begun is cleaned up
MOST_WORDS = 500  # of a reason in the table; the log has all of it


class DeadlinePassed(Exception):
    """The program has had its time."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step. `arena_bytes` is what the arena took in it."""

    step: str
    result: str
    seconds: float = 0.0
    why: str = ""
    arena_bytes: int = 0


@dataclass
class Passage:
    """One program, on one way, through its steps. `figures` is the checksum that it told of all its figures."""

    entry: Entry
    way: str
    outcomes: list[Outcome] = field(default_factory=list)
    log: str = ""
    seconds: float = 0.0

    @property
    def result(self) -> str:
        results = [outcome.result for outcome in self.outcomes]
        return next((one for one in (FAILED, IMPOSSIBLE, NOT_REACHED) if one in results), PASSED)

    @property
    def why(self) -> str:
        return next((f"{one.step}: {one.why}" for one in self.outcomes if one.why), "")

    @property
    def figures(self) -> str:
        return " ".join(sorted(re.findall(r"^(?:\d+: )?figures (\w+)$", self.log, re.MULTILINE)))


@dataclass(frozen=True)
class Bounded:
    """A machine whose calls end with a deadline, by the clock of time.monotonic()."""

    machine: Any
    until: float

    def __call__(self, *argv: str, status: int | None = 0, seconds: float = 300) -> str:
        left = max(self.until - time.monotonic(), LEFT_SECONDS)
        said: str = self.machine(*argv, status=status, seconds=min(seconds, left))
        return said


def flags_of(entry: Entry, way: str) -> list[str]:
    """Return ctr's flags for its container, in addition to those that all have."""
    variables = {"PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1", **entry.variables}
    flags = [word for name, value in variables.items() if value for word in ("--env", f"{name}={value}")]
    return [*flags, *entry.flags, *(ARENA if way == "arena" else ())]


def command(entry: Entry, mib: int) -> list[str]:
    argv = [sys.executable, "-m", "tests.gpu.zoo.payload", entry.work, "--mib", str(min(entry.mib, mib))]
    return [*argv, "--prefix", entry.prefix] if entry.prefix else argv


def pass_through(bench: Bench, entry: Entry, way: str, folder: Path) -> Passage:
    """Take a program through its steps; the first that fails is the last. Its log and images are kept in `folder`."""
    bounded: Any = Bounded(bench.machine, time.monotonic() + entry.seconds)
    walk = _Walk(replace(bench, machine=bounded, rows=[]), entry, way, folder)
    passage, began = Passage(entry, way), time.monotonic()
    try:
        for step in entry.steps:
            outcome = _attempt(walk, step, bounded.until)
            passage.outcomes.append(outcome)
            if outcome.result != PASSED:
                break
    finally:
        passage.outcomes += [Outcome(step, NOT_REACHED) for step in entry.steps[len(passage.outcomes) :]]
        passage.log = walk.log.read_text(errors="replace") if walk.log.exists() else ""
        _end(walk, passage)
    passage.seconds = time.monotonic() - began
    return passage


def _attempt(walk: _Walk, step: str, until: float) -> Outcome:
    began = time.monotonic()
    walk.arena_bytes = 0
    try:
        if began > until:
            raise DeadlinePassed(f"{walk.entry.seconds} s are over")
        walk.do(step)
    except Exception as error:  # noqa: BLE001  # a program that fails is a result, and the others are to be run, too
        seconds = time.monotonic() - began
        if reason := walk.told("impossible"):
            return Outcome(step, IMPOSSIBLE, seconds, reason)
        return Outcome(step, FAILED, seconds, walk.told("wrong") or brief(error), walk.arena_bytes)
    return Outcome(step, PASSED, time.monotonic() - began, arena_bytes=walk.arena_bytes)


def _end(walk: _Walk, passage: Passage) -> None:
    """Remove what is left. What fails in that does not hide what failed before, and fails the last step."""
    try:
        walk.end()
    except Exception as error:  # noqa: BLE001  # as above
        last = passage.outcomes[-1]
        why = f"{last.why + '; ' if last.why else ''}not cleaned up: {brief(error)}"
        passage.outcomes[-1] = replace(last, result=FAILED, why=why)


def brief(error: BaseException) -> str:
    """Return what an error says, on one line, its end where it is long: there a program's own words are."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{' '.join(map(str, error.cmd))[:200]} has not ended after {error.timeout:.0f} s"
    text = " / ".join(line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip())
    return text if len(text) <= MOST_WORDS else f"{text[:120]} … {text[-(MOST_WORDS - 123) :]}"


class _Walk:
    """The container that there is now, and what is done with it."""

    def __init__(self, bench: Bench, entry: Entry, way: str, folder: Path) -> None:
        self.bench, self.entry, self.way = bench, entry, way
        self.name = f"zoo-{entry.name}-{way}"
        self.log = folder / f"{self.name}.log"
        self.arena_bytes = 0
        self._folder, self._number = folder, 0
        self._flags = flags_of(entry, way)
        self._stack = ExitStack()
        self._container: Container | None = None

    def do(self, step: str) -> None:
        kind = re.sub(r"-(\d+|restored)$", "", step)
        {
            "start": self._start,
            "suspend": self._suspend,
            "checkpoint": self._checkpoint,
            "checkpoint-exit": self._leave,
            "restore": self._restore,
            "suspend-refused": self._refused_suspend,
            "checkpoint-refused": self._refused_checkpoint,
            "goes-on": self._computes_on,
        }[kind]()

    def told(self, word: str) -> str:
        """Return what the program has said after "wrong" or "impossible", "" for nothing."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        found = re.search(rf"^{word}: (.*)$", text, re.MULTILINE)
        return found[1] if found else ""

    def end(self) -> None:
        self._stack.close()
        shutil.rmtree(self._image, ignore_errors=True)

    @property
    def id(self) -> str:
        return self.name if not self._number else f"{self.name}-{self._number}"

    @property
    def _image(self) -> Path:
        return self._folder / f"{self.name}.image"

    def _enter(self, *argv: str, flags: Sequence[str] = ()) -> None:
        running = container(
            self.bench, self.id, *argv, programs=self.entry.lines, flags=[*self._flags, *flags], log=self.log
        )
        self._container = self._stack.enter_context(running)
        self._computes_on()

    def _start(self) -> None:
        self.log.unlink(missing_ok=True)
        self._enter(*command(self.entry, self.bench.mib))

    def _suspend(self) -> None:
        assert self._container is not None
        self._note(self.bench.kybernate("suspend", self.id, "--json"))
        self._comes_to_rest(self._container)
        self.bench.kybernate("resume", self.id, "--json")
        self._computes_on()

    def _comes_to_rest(self, one: Container) -> None:
        """Wait until a suspended program says nothing more; what it had said before takes a moment to be in the log."""
        until, before = time.monotonic() + REST_SECONDS, None
        time.sleep(STILL_SECONDS)
        while (now := one.steps()) != before:
            assert time.monotonic() < until, f"it computes while it is suspended, from {before} to {now}"
            before = now
            time.sleep(STILL_SECONDS)

    def _checkpoint(self) -> None:
        self._write_image()
        shutil.rmtree(self._image)
        self._computes_on()

    def _leave(self) -> None:
        self._write_image("--exit")
        self._stack.close()

    def _restore(self) -> None:
        self._number += 1
        self._enter("/never/run", flags=["--annotation", f"kybernate.io/restore-from={self._image}"])
        shutil.rmtree(self._image)

    def _refused_suspend(self) -> None:
        self._is_refused(self.bench.kybernate("suspend", self.id, status=4))

    def _refused_checkpoint(self) -> None:
        self._is_refused(self.bench.kybernate("checkpoint", self.id, str(self._image), status=4))

    def _is_refused(self, said: str) -> None:
        assert self.entry.refused in said, f"it should name {self.entry.refused!r}: {said}"

    def _write_image(self, *flags: str) -> None:
        # With the changes of the file system: compilers and process pools keep files in /tmp.
        said = self.bench.kybernate("checkpoint", self.id, str(self._image), "--json", *self.entry.checkpoint, *flags)
        self._note(said)

    def _computes_on(self) -> None:
        assert self._container is not None
        self._container.computes_on(self.entry.lines)

    def _note(self, said: str) -> None:
        steps = json.loads(said)["steps"]
        self.arena_bytes = sum(step["bytes"] for step in steps if step["name"] == "arena-take")


def all_passages(entries: Sequence[Entry], ways: Sequence[str]) -> Iterator[tuple[Entry, str]]:
    """Yield what is to be gone through, in order."""
    return ((entry, way) for entry in entries for way in entry.ways if way in ways)
