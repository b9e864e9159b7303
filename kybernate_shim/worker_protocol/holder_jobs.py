"""The jobs of a holder, which holds the threads of one process, or memory that it has released. One after the other."""

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

    `helper` is the command of another helper, to be started where none comes by itself when the client is gone.
    """

    pid: int
    seconds: float
    helper: tuple[str, ...]


class LetGo(Job[None], frozen=True):
    """Let them resume, and give up what is kept."""


class Keeping(msgspec.Struct, frozen=True):
    """What process `keeper`, the holder, keeps of process `pid`: pairs of a block's index and a descriptor of its."""

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
    """Give up the first `blocks` of those that were to be kept. Idempotent."""

    blocks: int


HolderJob = Held | Stop | LetGo | Keep | ListKept | GiveUp
JOBS: Form[HolderJob] = Form(HolderJob, "job of a holder")
