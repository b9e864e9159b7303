"""The jobs of a holder, which are done one after the other. It holds one of three things:

- the threads of a process, for the arena (`Stop`)
- the threads of processes until memory covers what the driver takes away (`StopUntilCovered`)
- memory that a process has released (`Keep`)
"""

from __future__ import annotations

import msgspec

from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.errors import ErrorTypes
from kybernate_shim.worker_protocol.messages import Form, Job

PROGRAM = "kybernate_shim.cuda_holder.holder"
ERRORS = ErrorTypes(InjectionFailed)


class Held(Job[int], frozen=True):
    """Return the pid of the process that is held, 0 if none is."""


class Stop(Job[None], frozen=True):
    """Stop all threads of a process but those that have to work, within so many seconds.

    `helper` is the command of another helper, to be started where no other helper connects after the client is gone.
    """

    pid: int
    seconds: float
    helper: tuple[str, ...]


class LetGo(Job[None], frozen=True):
    """Let threads resume, cover what is uncovered, and release what is kept."""


class StopUntilCovered(Job[tuple[tuple[int, str], ...]], frozen=True):
    """Stop the threads of processes that the driver is about to checkpoint, until they are covered.

    Returns the pids of those whose threads could not be stopped, and why. They may have a debugger; or with `by_caller`
    the client of the helper has stopped them, and covers them itself. `helper` as in Stop.
    """

    pids: tuple[int, ...]
    by_caller: bool
    helper: tuple[str, ...]


class Covered(msgspec.Struct, frozen=True):
    """What has failed, by pid. The threads of `continued` were not stopped all the time: the driver needed a lock."""

    failures: tuple[tuple[int, str], ...] = ()
    continued: tuple[int, ...] = ()


class Cover(Job[Covered], frozen=True):
    """Cover what the driver has taken away of processes that it is done with, and let their threads resume."""

    pids: tuple[int, ...]


class ListUncovered(Job[tuple[int, ...]], frozen=True):
    """Return the processes that are not covered."""


class Keeping(msgspec.Struct, frozen=True):
    """What process `keeper`, the holder, keeps of process `pid`: pairs of a block's index and its descriptor."""

    pid: int = 0
    keeper: int = 0
    descriptors: tuple[tuple[int, int], ...] = ()


class Keep(Job[Keeping], frozen=True):
    """Keep the memory behind descriptors of `worker`, which a process is about to release, until it is copied.

    `helper` as in Stop.
    """

    pid: int
    worker: int
    descriptors: tuple[tuple[int, int], ...]
    helper: tuple[str, ...]


class ListKept(Job[Keeping], frozen=True):
    """Return what is kept."""


class GiveUp(Job[None], frozen=True):
    """Release the first `blocks` of those that are kept. Idempotent."""

    blocks: int


HolderJob = Held | Stop | LetGo | StopUntilCovered | Cover | ListUncovered | Keep | ListKept | GiveUp
JOBS: Form[HolderJob] = Form(HolderJob, "job of a holder")
