"""A process that holds another process's threads for the arena, and outlives the CUDA helper that requests it.

Where memory is away while the driver is unlocked, there are placeholders, on which resumed threads would compute. So
the threads are held until a helper releases them, even if the present one ends: the next one connects here, brings the
process into order, and releases it. The kernel kills the process if its holder ends first. A holder has one process at
a time, and does no more than that: all else that can fail is in the helper and its workers.

Threads are also stopped while the driver checkpoints a process, until memory covers what it has taken away (see
`uncovered`). These resume if the holder ends first.

Another holder keeps memory that a process has released and that is not in the arena yet: a worker copies it while the
driver checkpoints the process. As long as a descriptor of it is open, it is on the GPU, and another worker can copy it
if the first one dies.

It is a process, and not a thread of a shim's daemon: a container's processes are the daemon's children, and its wait
for any child would consume their stops. It runs in its own session, and is no child of the helper.

It does the jobs of `worker_protocol.holder_jobs`, for one helper after the other. Its argument is the path of a socket;
when the command that starts it returns, the holder listens there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import assert_never

from kybernate_shim.arena.control import must_run, take_descriptor
from kybernate_shim.cuda_holder.uncovered import STOP_SECONDS, UncoveredProcess
from kybernate_shim.linux.limits import raise_descriptors
from kybernate_shim.linux.process import has_ended, set_oom_score_adj
from kybernate_shim.linux.ptrace.seized import SeizedProcess
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.errors import MessageInvalid
from kybernate_shim.worker_protocol.holder_jobs import (
    ERRORS,
    JOBS,
    Cover,
    Covered,
    GiveUp,
    Held,
    HolderJob,
    Keep,
    Keeping,
    LetGo,
    ListKept,
    ListUncovered,
    Stop,
    StopUntilCovered,
)
from kybernate_shim.worker_protocol.messages import JobDone, changed
from kybernate_shim.worker_protocol.programs import arguments
from kybernate_shim.worker_protocol.server import JobCall, WorkerServer, immediately

FIRST_SECONDS = 20.0  # for the helper that has started us to connect
ORPHAN_SECONDS = 5.0  # without a helper, before we start one; a daemon that misses it is faster
LOOK_SECONDS = 0.2  # between two looks at whether a process without requests has ended
GRACE_SECONDS = 1.0  # for threads that do not stop in their time
LAST_TO_DIE = -1000  # when memory runs out
NOT_FOR_US = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Holder:
    """Serves one connection after the other, until there is none and nothing is held."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._helper: tuple[str, ...] = ()
        self._held: SeizedProcess | None = None
        self._kept = KeptMemory()
        self._uncovered: dict[int, UncoveredProcess] = {}

    def serve(self) -> None:
        self._listener.settimeout(FIRST_SECONDS)
        with suppress(TimeoutError):
            connection: socket.socket | None = self._listener.accept()[0]
            while connection is not None:
                with connection:
                    self._converse(connection)
                connection = self._await_helper()

    def _converse(self, connection: socket.socket) -> None:
        """Serve one connection. Nothing that is received may end this process, which holds another one."""
        connection.settimeout(None)
        try:
            WorkerServer(connection, JOBS, ERRORS, self._do, immediately).serve()
        except OSError:
            pass  # the helper has ended
        except MessageInvalid as error:
            with suppress(OSError):  # of a disk that is full
                sys.stderr.write(f"{error}\n")

    def _do(self, job: HolderJob, call: JobCall) -> JobDone:
        try:
            match job:
                case Held():
                    return job.done_by(lambda _: self._held.pid if self._held else 0)
                case Stop():
                    return job.done_by(self._stop)
                case LetGo():
                    return job.done_by(lambda _: self._let_go())
                case StopUntilCovered():
                    return job.done_by(self._stop_until_covered)
                case Cover():
                    return job.done_by(lambda job: self._cover(job.pids))
                case ListUncovered():
                    return job.done_by(lambda _: tuple(self._uncovered))
                case Keep():
                    return job.done_by(self._keep)
                case ListKept():
                    return job.done_by(lambda _: self._kept.keeping)
                case GiveUp():
                    return job.done_by(lambda job: self._kept.give_up(job.blocks))
        except InjectionFailed:
            raise
        except Exception as error:
            raise InjectionFailed(repr(error)) from error
        assert_never(job)

    def _stop(self, job: Stop) -> None:
        self._let_go()
        self._helper = job.helper
        held = SeizedProcess(job.pid, spare=must_run, seconds=job.seconds, tied=True)
        held.__enter__()
        self._held = held

    def _keep(self, job: Keep) -> Keeping:
        self._let_go()
        self._helper = job.helper
        self._kept.take(job)
        return self._kept.keeping

    def _stop_until_covered(self, job: StopUntilCovered) -> tuple[tuple[int, str], ...]:
        self._let_go()
        self._helper = job.helper
        self._uncovered = {pid: UncoveredProcess(pid, by_caller=job.by_caller) for pid in job.pids}
        until = time.monotonic() + STOP_SECONDS + GRACE_SECONDS
        stopped = [(pid, one.stopped(until - time.monotonic())) for pid, one in self._uncovered.items()]
        return tuple((pid, failure) for pid, failure in stopped if failure)

    def _cover(self, pids: Iterable[int]) -> Covered:
        done = [self._uncovered.pop(pid) for pid in pids if pid in self._uncovered]
        for one in done:
            one.begin_to_cover()
        until = time.monotonic() + STOP_SECONDS + GRACE_SECONDS
        covered = [(one.pid, one.covered(until - time.monotonic())) for one in done]
        return Covered(
            tuple((pid, failure) for pid, failure in covered if failure),
            tuple(one.pid for one in done if one.continued),
        )

    def _let_go(self) -> None:
        self._kept.close()
        self._cover(tuple(self._uncovered))
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)

    def _await_helper(self) -> socket.socket | None:
        """Wait for a helper as long as something is held; start one if none comes by itself."""
        self._listener.settimeout(LOOK_SECONDS)
        since = time.monotonic()
        while any(pid and not has_ended(pid) for pid in self._concerned()):
            try:
                return self._listener.accept()[0]
            except OSError:  # TimeoutError for most
                if time.monotonic() - since > ORPHAN_SECONDS:
                    self._start_helper()
                    since = time.monotonic()
        self._let_go()
        return None

    def _concerned(self) -> Iterable[int]:
        return (self._held.pid if self._held else 0, self._kept.keeping.pid, *self._uncovered)

    def _start_helper(self) -> None:
        """Start a helper; where there is one already, the new one ends immediately."""
        with suppress(OSError):
            os.posix_spawn(self._helper[0], list(self._helper), os.environ, setsid=True, setsigdef=NOT_FOR_US)


class KeptMemory:
    """Descriptors of memory of one process. `keeping` names them."""

    def __init__(self) -> None:
        self.keeping = Keeping()

    def take(self, job: Keep) -> None:
        """Take over a worker's descriptors. Raises OSError, with none taken."""
        raise_descriptors()
        pidfd = os.pidfd_open(job.worker)
        found: list[tuple[int, int]] = []
        try:
            for block, descriptor in job.descriptors:
                found.append((block, take_descriptor(pidfd, descriptor)))
        except OSError:
            for _, descriptor in found:
                os.close(descriptor)
            raise
        finally:
            os.close(pidfd)
        self.keeping = Keeping(job.pid, os.getpid(), tuple(found))
        self._given_up = 0

    def give_up(self, blocks: int) -> None:
        """Close the descriptors of the first `blocks` of those that were taken over."""
        for _, descriptor in self.keeping.descriptors[: blocks - self._given_up]:
            os.close(descriptor)
        self.keeping = changed(self.keeping, descriptors=self.keeping.descriptors[max(0, blocks - self._given_up) :])
        self._given_up = max(blocks, self._given_up)

    def close(self) -> None:
        for _, descriptor in self.keeping.descriptors:
            os.close(descriptor)
        self.keeping = Keeping()


def main(path: Path) -> None:
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        if os.fork():
            os._exit(0)
        os.setsid()
        with suppress(OSError):
            set_oom_score_adj(os.getpid(), LAST_TO_DIE)
        try:
            Holder(listener).serve()
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(*arguments(sys.argv)))
