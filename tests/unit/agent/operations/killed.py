"""A program whose agent is killed by SIGKILL at each of its journal writes and effects in turn, and started again.

Each agent is a process of its own, forked from this one: `killed.py DIRECTORY`. It submits a checkpoint, an export, and
one that is cancelled, and carries them out by writing files. After each kill another agent completes them, and what
the journal says is compared with the files. Prints the number of places at which an agent was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kybernate.agent.journal import Journal
from kybernate.agent.operations.engine import Engine
from kybernate.agent.operations.executor import Heard
from kybernate.agent.operations.store import SCHEMA
from kybernate.node.failure import Failure
from kybernate.verbs.checkpoint import Checkpoint
from kybernate.verbs.errors import OperationUndone
from kybernate.verbs.every import VERBS
from kybernate.verbs.export import Export
from kybernate.verbs.model import Arguments, Observation, Operation, Result, Seen, State, Submission, Target
from kybernate.verbs.verify import Verify

T = TypeVar("T")
REQUESTS = (Checkpoint("web"), Export("image", "/x"), Verify("image"))
EXPECTED = [State.SUCCEEDED, State.FAILED, State.CANCELLED]


class Killer:
    """Kills its own process at the n-th point; 0 means never."""

    def __init__(self, at: int) -> None:
        self._at, self._passed = at, 0

    def point(self) -> None:
        self._passed += 1
        if self._passed == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledJournal(Journal):
    killer: Killer

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self.killer.point()
        result = await super().run(work)
        self.killer.point()
        return result


class Files:
    """An executor whose work is a file: half of it, then all of it. An export fails, a verify waits for its end."""

    def __init__(self, directory: Path, killer: Killer) -> None:
        self._directory, self._killer = directory, killer
        self._stop: dict[str, asyncio.Event] = {}

    verbs = VERBS

    async def meant(self, arguments: Arguments) -> Arguments:
        return arguments

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        self._killer.point()
        return Target(writes=str(self._directory / id), holds=(type(arguments).__name__,))

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        file = Path(operation.target.writes)
        self._killer.point()
        with file.open("x") as out:
            out.write("half")
        self._killer.point()
        if isinstance(operation.arguments, Verify):
            await self._stop.setdefault(operation.id, asyncio.Event()).wait()
        if isinstance(operation.arguments, Verify | Export):
            file.unlink()
            self._killer.point()
            raise OperationUndone("undone") if isinstance(operation.arguments, Verify) else Failure("no room")
        file.write_text("whole")
        self._killer.point()
        return Result(path=str(file))

    async def cancel(self, operation: Operation) -> None:
        self._killer.point()
        self._stop.setdefault(operation.id, asyncio.Event()).set()

    async def observe(self, operation: Operation) -> Observation:
        self._killer.point()
        file = Path(operation.target.writes)
        if not file.exists():
            return Observation(Seen.ABSENT)
        if file.read_text() == "whole":
            return Observation(Seen.SUCCEEDED, result=Result(path=str(file)))
        return Observation(Seen.HALF_DONE)

    async def roll_back(self, operation: Operation) -> str:
        self._killer.point()
        Path(operation.target.writes).unlink()
        self._killer.point()
        return "removed"


class NoEvents:
    async def record(self, type: str, level: str, message: str, **fields: str) -> object:
        return None


async def agent(directory: Path, killer: Killer) -> None:
    """Submit what is not submitted yet, cancel the last one, and work until all has ended."""
    journal = KilledJournal(directory / "journal", SCHEMA)
    journal.killer = killer
    engine = Engine(journal, Files(directory, killer), events=NoEvents())
    running = asyncio.create_task(engine.run())
    ids = [(await engine.submit(Submission(request, key=str(n)))).id for n, request in enumerate(REQUESTS)]
    await engine.cancel(ids[-1])
    for id in ids:
        async for _ in engine.watch(id):
            pass
    running.cancel()
    await asyncio.wait({running})
    journal.close()


def process(directory: Path, at: int) -> int:
    """Run an agent in a process of its own, and return how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(asyncio.wait_for(agent(directory, Killer(at)), 60))
        except BaseException as error:  # noqa: BLE001  # the process must not return into its parent's code
            print(f"killed at {at}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def check(directory: Path, at: int) -> None:
    """Compare the journal with the files."""
    journal = Journal(directory / "journal", SCHEMA)
    engine = Engine(journal, Files(directory, Killer(0)), events=NoEvents())
    found = list(reversed(await engine.list()))
    journal.close()
    states = [one.state for one in found]
    files = [path.name for path in directory.iterdir() if not path.name.startswith("journal")]
    assert states == EXPECTED, f"killed at {at}: {states} {[one.fault for one in found]}"
    assert files == [found[0].id], f"killed at {at}: {files}"
    assert Path(found[0].target.writes).read_text() == "whole", f"killed at {at}"


def main(base: Path) -> None:
    at = 0
    while True:
        at += 1
        directory = base / str(at)
        directory.mkdir()
        ended = process(directory, at)
        if ended not in (0, -signal.SIGKILL):
            raise SystemExit(f"the agent that was to be killed at {at} ended by itself: {ended}")
        if ended and (status := process(directory, 0)):
            raise SystemExit(f"the agent after the kill at {at} ended with {status}")
        asyncio.run(check(directory, at))
        if not ended:
            break
    print(at - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
