"""The process that moves VRAM bytes for a shim: it holds, compares, copies and drops, one job after the other.

This is not done in the shim, because a tracer must not wait for any child, as a shim's reaper does, and because the
copies keep an interpreter busy. It does the jobs of `worker_protocol.mover_jobs`; its argument is the descriptor of its
end of a socket. It ends with its shim, and the kernel then releases what it held.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kybernate_shim.linux.ptrace.tracee import injections
from kybernate_shim.vram_mover.handler import MoverJobHandler
from kybernate_shim.worker_protocol.mover_jobs import ERRORS, JOBS
from kybernate_shim.worker_protocol.programs import arguments
from kybernate_shim.worker_protocol.server import WorkerServer, serve_and_exit

Work = Callable[[], None]
CALL_SECONDS = 5.0  # for the calls that are being made in another process, which take microseconds


def main() -> None:
    """Serve jobs until the shim closes its end."""
    (descriptor,) = arguments(sys.argv)
    # A kill in the middle of a call that we make in another process may end that process with us.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    jobs: queue.SimpleQueue[Work] = queue.SimpleQueue()
    threading.Thread(target=_work_off, args=(jobs,), daemon=True).start()
    connection = socket.socket(fileno=int(descriptor))
    # No client is left for the result of a running job, when this one has closed its end.
    serve_and_exit(WorkerServer(connection, JOBS, ERRORS, MoverJobHandler().handle, jobs.put), _end_calls)


def _end_calls() -> None:
    """Restore the state of each thread of another process that makes a call for us."""
    injections.close(CALL_SECONDS)


def _work_off(jobs: queue.SimpleQueue[Work]) -> None:
    while True:
        jobs.get()()


if __name__ == "__main__":
    main()
