"""The jobs of a holder, which holds the threads of one process at a time. It does one after the other."""

from __future__ import annotations

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
    """Let them resume."""


HolderJob = Held | Stop | LetGo
JOBS: Form[HolderJob] = Form(HolderJob, "job of a holder")
