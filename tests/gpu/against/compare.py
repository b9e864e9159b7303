"""Takes both sides through the same work in turns, and reports after each step what is known by then.

For each size: suspend and resume of one program; swaps of two; then a whole container of --container-gib, restored from
an image in memory until it computes; then first suspends: of a process under a new helper, whose arena is empty, and of
a process whose helper has moved others before. The order of the sides changes with each round. A side that fails is
reported and left out of the rest of that part; the other continues, and both begin the next part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.against import pretended_payload
from tests.gpu.against.results import SIDES, Sample, compared, text
from tests.gpu.against.sides import NoSuchSide, Package, Side, SideFailed
from tests.gpu.against.timeline import Span
from tests.gpu.host_memory import available, touch_what_is_there
from tests.gpu.machine import CHECKOUT
from tests.gpu.pack import pack

GIB = 1 << 30
ASK_SECONDS = 60
START_SECONDS = 180  # of a program, or of a node with its container
GRACE_SECONDS = 45  # that what was begun may take beyond the deadline
HOST_GIB = 5  # of the machine's memory that a program takes in addition to what the arena has of it
GPU_GIB = 4  # of the GPU
MOST_BALLAST_MARGIN = 6 * GIB  # that a ballast leaves free: room for the driver's part of a program
PAYLOAD = CHECKOUT / "tests/gpu/arena_payload.py"
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class Run:
    """One comparison: what it consists of, how long it may take, and what is known by now."""

    arguments: argparse.Namespace
    packages: Sequence[Package]
    until: float  # by time.monotonic()
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return Path(self.arguments.out)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def rounds(self, count: int, what: str) -> Iterator[int]:
        """Number the rounds; none begins when the time is over."""
        for number in range(count):
            if self.over:
                self.unreached.append(f"{what}: {count - number} of {count} rounds, the time was over")
                return
            yield number

    def note(self, sample: Sample) -> None:
        self.samples.append(sample)
        told = ", ".join(f"{name} {cost:.3f}" for name, cost in sample.steps.items())
        print(f"  {sample.side} {sample.what:28} {sample.seconds:8.3f} s   {told}", flush=True)
        with (self.out / "rounds.jsonl").open("a") as stream:
            stream.write(sample.line())
        self.report()

    def report(self) -> None:
        """Write what is known: a run that is cut short leaves that."""
        (self.out / "against.jsonl").write_text("".join(one.line() for one in compared(self.samples)))
        (self.out / "against.md").write_text(self.text())

    def text(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        heading = f"{when} UTC, {os.cpu_count()} cores, kernel {os.uname().release}. Old: {self.arguments.against}"
        return text(heading, self.samples, self.failures, self.unreached)


@dataclass
class Part:
    """Both sides in one part of the run, each a process of its own; one that fails is ended."""

    run: Run
    name: str
    gib: float
    sides: dict[str, Side]

    def turns(self, number: int = 0) -> list[str]:
        """Return the sides that work, beginning with the other one in every other round."""
        names = [name for name in SIDES if name in self.sides]
        return names if number % 2 == 0 else names[::-1]

    def ask(self, side: str, verb: str, seconds: float = ASK_SECONDS, **arguments: Any) -> dict[str, Any]:
        """Ask a side; the answer is empty where it fails, or has failed before."""
        if side not in self.sides:
            return {}
        left = self.run.until + GRACE_SECONDS - time.monotonic()
        try:
            return {"seconds": 0.0, **self.sides[side].ask(verb, max(1.0, min(seconds, left)), **arguments)}
        except SideFailed as error:
            self.run.failures.append(f"{self.name}, {side}: {error}")
            print(f"  {side} FAILED {error}", flush=True)
            self.sides.pop(side).end()
            self.run.report()
            return {}

    def measure(self, side: str, what: str, verb: str, **arguments: Any) -> bool:
        """Ask, and keep what it cost; False where it has failed."""
        answer = self.ask(side, verb, **arguments)
        if answer:
            found = [Span(**span) for span in answer.get("spans", ())]
            self.run.note(Sample(self.gib, what, side, answer["seconds"], answer.get("steps", {}), found))
        return bool(answer)


@contextmanager
def part(run: Run, name: str, gib: float, kind: str = "in-place") -> Iterator[Part]:
    """Have both sides for a part; everything that they started is ended with it."""
    print(name, flush=True)
    both = Part(run, name, gib, {one.name: Side(one, kind, run.out / f"{one.name}.log") for one in run.packages})
    try:
        yield both
    finally:
        for side in both.sides.values():
            side.end()


def in_place(run: Run, gib: float, *, changed: float, rounds: int, swaps: int) -> None:
    """Suspend and resume one program of each side, then swap two."""
    name = f"{gib:g} GiB, {changed:.0%} changed"
    if not _has_room(run, name, 2 * (1 + bool(swaps)), gib):
        return
    with part(run, name, gib) as both:
        for side in both.turns():
            if not _opened(both, side, changed, 1 + bool(swaps)):
                return
            both.measure(side, "suspend, first of a node", "suspend", name="one")
        suffix = "" if changed == 1 else f", {changed:.0%} changed"
        for number in run.rounds(rounds + 1, name):
            for side in both.turns(number):
                which = suffix if number else ", first of a node"
                if both.measure(side, f"resume{which}", "resume", name="one") and number:
                    both.measure(side, f"suspend{suffix}", "suspend", name="one")
                elif not number:  # the first round hashes, and fills what later ones use
                    both.ask(side, "suspend", name="one")
        if swaps and not run.over:
            _swap(run, both, swaps, suffix)


def _opened(both: Part, side: str, changed: float, programs: int) -> bool:
    """Start a helper and a program; False where the GPU is too small for it."""
    run = both.run
    payload = pretended_payload.__file__ if run.arguments.pretended else str(PAYLOAD)
    argv = [payload, "run", str(both.gib), str(changed)]
    opened = both.ask(side, "open", gib=both.gib, payload=argv, programs=programs)
    if opened and opened["gpu_bytes"] < (both.gib + (GPU_GIB if both.gib >= 1 else 0)) * GIB:
        run.unreached.append(f"{both.name}: the GPU has {opened['gpu_bytes'] / GIB:.0f} GiB")
        return False
    both.ask(side, "start", START_SECONDS, name="one")
    return True


def _swap(run: Run, both: Part, rounds: int, suffix: str) -> None:
    """Let two programs of a side change places on a GPU that has room for one; between turns both are away."""
    for side in both.turns():
        both.ask(side, "start", START_SECONDS, name="two")
        both.ask(side, "suspend", name="two")
    held = [found for side in both.turns() if (found := both.ask(side, "needs", name="two"))]
    if not held:
        return
    needed, free = max(one["taken"] for one in held), min(one["free"] for one in held)
    with ballast(free - needed - min(MOST_BALLAST_MARGIN, needed // 2), pretended=bool(run.arguments.pretended)):
        for number in run.rounds(rounds + 1, f"{both.name}, swap"):
            out, back = ("one", "two") if number % 2 == 0 else ("two", "one")
            for side in both.turns(number):
                both.ask(side, "resume", name=out)
                if number:
                    both.measure(side, f"swap{suffix}", "swap", out=out, back=back)
                else:
                    both.ask(side, "swap", out=out, back=back)
                both.ask(side, "suspend", name=back)


@contextmanager
def ballast(size: int, *, pretended: bool) -> Iterator[None]:
    """Hold so many bytes of the GPU."""
    argv = [pretended_payload.__file__, "hold"] if pretended else ["-c", BALLAST]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    process = subprocess.Popen([sys.executable, *argv, str(max(0, size))], env=environment, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n", "the GPU cannot be filled up"
        yield
    finally:
        process.kill()
        process.communicate()


def container(run: Run, gib: float, *, rounds: int) -> None:
    """Restore a whole container from an image in memory until it computes, and checkpoint it again."""
    arguments, name = run.arguments, f"container of {gib:g} GiB"
    if not (arguments.kit / "wheels").is_dir():
        run.unreached.append(f"{name}: there is no kit in {arguments.kit} (python -m tests.gpu.kit)")
        return
    if not _has_room(run, name, 4, gib):  # an image and the arena's part, twice
        return
    where = {"kit": str(arguments.kit.absolute()), "root": arguments.root, "pretended": arguments.pretended}
    with part(run, name, gib, "container") as both:
        for side in both.turns():
            both.ask(side, "open", START_SECONDS, gib=gib, **where)
        for number in run.rounds(rounds + 1, name):
            for side in both.turns(number):
                if not number:  # which fills what later ones use
                    both.ask(side, "restore", START_SECONDS)
                    both.ask(side, "checkpoint", START_SECONDS)
                elif both.measure(side, "restore until it computes", "restore"):
                    both.measure(side, "checkpoint, exit", "checkpoint")


def firsts(run: Run, gib: float, *, rounds: int) -> None:
    """Suspend processes for the first time: the first of a new helper, and one after it; each with a later suspend."""
    name = f"first suspends of {gib:g} GiB"
    if not _has_room(run, name, 1, gib):
        return
    for number in run.rounds(rounds, name):
        with part(run, name, gib) as both:
            for side in both.turns(number):
                if not _opened(both, side, 1.0, 1):
                    return
                both.measure(side, "suspend, first of a node", "suspend", name="one")
                both.ask(side, "end", name="one")
                both.ask(side, "start", START_SECONDS, name="two")
                both.measure(side, "suspend, first of a process", "suspend", name="two")
                both.measure(side, "resume, first of a process", "resume", name="two")
                both.measure(side, "suspend, second of a process", "suspend", name="two")
                both.ask(side, "close")


def _has_room(run: Run, name: str, programs: int, gib: float) -> bool:
    """Tell whether the machine's memory is enough; what is not is a line of the report."""
    extra = HOST_GIB if gib >= 1 else 0.1
    needed, free = programs * (gib * 1.06 + extra), available() / GIB
    if needed > free:
        run.unreached.append(f"{name}: it needs {needed:.0f} GiB of the machine's memory, of which {free:.0f} are free")
    return needed <= free


def _parts(run: Run) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the parts in the order in which they are worth their time."""
    given = run.arguments
    sizes, changed = (list(map(float, value.split(","))) for value in (given.gib, given.changed))
    for place, gib in enumerate(sizes):
        for share in changed:
            swaps = given.swap_rounds if gib <= given.most_swapped and share == changed[-1] else 0
            yield (
                f"{gib:g} GiB, {share:.0%} changed",
                partial(in_place, run, gib, changed=share, rounds=given.rounds, swaps=swaps),
            )
        if place == 0 and given.container_rounds:
            size = given.container_gib
            yield f"container of {size:g} GiB", partial(container, run, size, rounds=given.container_rounds)
    for gib in sizes if given.first_rounds else ():
        yield f"first suspends of {gib:g} GiB", partial(firsts, run, gib, rounds=given.first_rounds)


def compare(arguments: argparse.Namespace) -> int:
    """Compare, write `against.md`, `against.jsonl`, `rounds.jsonl` and the logs; return 1 where something failed."""
    until = time.monotonic() + arguments.minutes * 60
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name in ("rounds.jsonl", *(f"{side}.log" for side in SIDES)):
        (out / name).unlink(missing_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("builds the native parts of both sides", flush=True)
        try:
            checkouts = dict(zip(SIDES, (arguments.against.absolute(), CHECKOUT), strict=True))
            packages = [Package.copied(name, path, folder / name) for name, path in checkouts.items()]
        except NoSuchSide as error:
            print(error, file=sys.stderr)
            return 2
        run = Run(arguments, packages, until)
        _touch(arguments)
        for name, work in _parts(run):
            if run.over:
                run.unreached.append(f"{name}: the time was over")
                continue
            try:
                work()
            except Exception as error:  # noqa: BLE001  # the other parts are still of interest
                run.failures.append(f"{name}: {type(error).__name__}: {error}")
    run.report()
    print(run.text(), flush=True)
    if arguments.pack:
        print("\n".join(pack(out, arguments.pack)), flush=True)
    return int(bool(run.failures))


def _touch(arguments: argparse.Namespace) -> None:
    """Have the machine's memory there before it is measured: a virtual machine may get it at the first touch only."""
    most = max(map(float, arguments.gib.split(",")))
    if most >= 1:
        began = time.monotonic()
        touched = touch_what_is_there(int(2 * most * 1.2 * GIB))
        print(f"touched {touched / GIB:.0f} GiB of memory in {time.monotonic() - began:.0f} s", flush=True)
