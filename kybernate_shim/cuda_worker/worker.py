"""A worker of the CUDA helper: the only kind of process that loads libcuda.

It does the jobs of `worker_protocol.cuda_jobs`, each in its own thread, because ranks that talk to each other must be
locked at the same time. A call that hangs cannot be cancelled; the helper kills the worker then. Its arguments are the
descriptor of its end of a socket; with `arena FOLDER SIZES SHARE` behind it, it moves processes' memory to and from the
arena there, too, and keeps what that needs. Such a job ends by itself when its seconds are over, so that no other job
is affected.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.linux.limits import raise_descriptors
from kybernate_shim.worker_protocol.cuda_jobs import ERRORS, JOBS, CudaJob, DriverUnusable
from kybernate_shim.worker_protocol.messages import JobDone
from kybernate_shim.worker_protocol.programs import arguments
from kybernate_shim.worker_protocol.server import JobCall, WorkerServer, in_own_thread, serve_and_exit

if TYPE_CHECKING:
    from kybernate_shim.cuda_worker.arena_executor import ArenaExecutor

Handle = Callable[[CudaJob, JobCall], JobDone]


def main() -> None:
    """Serve jobs until the helper closes its end; then exit, whatever the threads wait for, except a checkpoint."""
    os.umask(0o077)  # only root may read the files next to the arena
    descriptor, *arena = arguments(sys.argv)
    connection = socket.socket(fileno=int(descriptor))
    handle, at_end = _handle(arena)
    # A thread inside the driver would keep an orderly exit waiting.
    serve_and_exit(WorkerServer(connection, JOBS, ERRORS, handle, in_own_thread), at_end)


def _handle(arena: Sequence[str]) -> tuple[Handle, Callable[[], None]]:
    """Return the handler of jobs, with libcuda ready, or one that raises the reason why not; and what is done last."""
    try:
        from kybernate_shim.cuda_worker import driver  # here, because it needs an optional package
    except ImportError as error:
        return _refusing(f"the Python package cuda-bindings is missing ({error}): install kybernate[gpu]")
    from kybernate_shim.cuda_worker.handler import CudaJobHandler

    try:
        driver.initialize()
    except DriverUnusable as error:
        return _refusing(str(error))
    handler = CudaJobHandler(_arena_executor(arena) if arena else None)
    return handler.handle, handler.checkpoints.end


def _arena_executor(words: Sequence[str]) -> ArenaExecutor:
    from kybernate_shim.arena.banks import from_text  # only one worker of a node needs these
    from kybernate_shim.arena.memory import Memory
    from kybernate_shim.cuda_worker.arena_executor import ArenaExecutor

    raise_descriptors()  # it has one for each block that it copies
    _, folder, sizes, share = words
    return ArenaExecutor(Memory(from_text(sizes), Path(folder), float(share)))


def _refusing(why: str) -> tuple[Handle, Callable[[], None]]:
    def handle(job: CudaJob, call: JobCall) -> JobDone:
        raise DriverUnusable(why)

    return handle, lambda: None


if __name__ == "__main__":
    main()
