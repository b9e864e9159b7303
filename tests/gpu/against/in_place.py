"""Suspends, resumes and swaps programs of one side, with a helper and an arena of its own; runs in that side's process.

Between two questions all programs are suspended, and the GPU is the other side's.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper
from kybernate_shim.gpu.sequence import Step, resume, suspend
from kybernate_shim.linux import huge_pages
from kybernate_shim.native import PRELOAD, build
from tests.gpu.arena_programs import START_SECONDS, STEPS, Program, node, resumed

ROOM_SECONDS = 0.005  # between two looks at whether the GPU has room


@dataclass
class Known:
    """A program, and how much of it the arena had at its last suspend."""

    program: Program
    taken: int = 0

    @property
    def pid(self) -> int:
        return self.program.process.pid


class InPlace:
    """What the coordinator asks for. A method raises whatever went wrong."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._programs: dict[str, Known] = {}

    def open(self, gib: float, payload: list[str], programs: int) -> dict[str, Any]:
        """Start a helper with an empty arena for so many programs of `gib`. `payload` is their command line."""
        self._payload = payload
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        arena = self._folder / "arena"
        began = time.monotonic()
        socket = self._stack.enter_context(node(gib, self._folder, programs, arena))
        started = time.monotonic() - began
        self._runner = self._stack.enter_context(asyncio.Runner())
        connected = cuda_helper(socket, start=False)
        self._helper: CudaHelper = self._runner.run(connected.__aenter__())
        self._stack.callback(lambda: self._runner.run(connected.__aexit__(None, None, None)))
        self._stack.callback(self._end_programs)
        return {"seconds": started, "gpu_bytes": self._runner.run(self._helper.info()).gpus[0].total_bytes}

    def start(self, name: str) -> dict[str, Any]:
        """Start a program, and wait until it computes."""
        began = time.monotonic()
        program = Program.start(self._payload, build(PRELOAD), self._folder, name)  # it is built already
        self._programs[name] = Known(program)
        program.wait_for_steps(STEPS, START_SECONDS)
        return {"seconds": time.monotonic() - began}

    def suspend(self, name: str, *, change: bool = True) -> dict[str, Any]:
        one = self._programs[name]
        if change:
            one.program.change()
        with huge_pages.huge_pages("node"):
            began = time.monotonic()
            out = self._runner.run(suspend(self._helper, lambda: [one.pid], arena=True))
            seconds = time.monotonic() - began
        one.taken = out.taken.bytes
        _require_taken(out.taken.bytes, out.taken.reasons)
        return _cost(seconds, out.steps)

    def resume(self, name: str) -> dict[str, Any]:
        """Resume, and wait until it computes; that is not counted."""
        one = self._programs[name]
        *steps, whole = self._runner.run(resumed(self._helper, one.pid, one.taken))
        one.program.wait_for_steps(STEPS)
        return _cost(whole.seconds, steps)

    def swap(self, out: str, back: str) -> dict[str, Any]:
        """Let a program that computes change places with one that is suspended."""
        leaving, coming = self._programs[out], self._programs[back]
        leaving.program.change()

        async def room() -> None:
            while await self._free() < coming.taken:  # noqa: ASYNC110  # of another process
                await asyncio.sleep(ROOM_SECONDS)

        async def both() -> tuple[float, list[Step]]:
            began = time.monotonic()
            resuming = asyncio.create_task(resume(self._helper, [coming.pid], room=room))
            left = await suspend(self._helper, lambda: [leaving.pid], arena=True)
            steps = [*left.steps, *(await resuming)]
            seconds = time.monotonic() - began
            leaving.taken = left.taken.bytes
            _require_taken(left.taken.bytes, left.taken.reasons)
            return seconds, steps

        cost = _cost(*self._runner.run(both()), apart=False)
        coming.program.wait_for_steps(STEPS)
        return cost

    def end(self, name: str) -> None:
        """End a program; the arena keeps its memory for others."""
        self._programs.pop(name).program.end()

    def needs(self, name: str) -> dict[str, Any]:
        """Return the bytes that the arena has of a program, and those that are free on the first GPU."""
        return {"taken": self._programs[name].taken, "free": self._runner.run(self._free())}

    def remark(self) -> str:
        """Return the last line of each program that has ended by itself."""
        outputs = {name: one.program.output for name, one in self._programs.items() if one.program.process.poll()}
        last = {name: output.read_text().strip().rpartition("\n")[2] for name, output in outputs.items()}
        return ", ".join(f"{name} ended: {line}" for name, line in last.items())

    def close(self) -> None:
        """End the programs and the helper, and give the arena back."""
        self._stack.close()

    async def _free(self) -> int:
        return (await self._helper.info()).gpus[0].free_bytes or 0

    def _end_programs(self) -> None:
        for known in self._programs.values():
            known.program.end()
        self._programs.clear()


def _require_taken(taken: int, reasons: Any) -> None:
    assert taken, f"the arena has taken nothing: {reasons}"


def _cost(seconds: float, steps: Sequence[Step], *, apart: bool = True) -> dict[str, Any]:
    """Return seconds by step; where these follow each other, also what no step is: memory made ready before a lock."""
    told = {step.name: step.seconds for step in steps}
    return {
        "seconds": seconds,
        "steps": {**told, "outside of the steps": seconds - sum(told.values())} if apart else told,
    }
