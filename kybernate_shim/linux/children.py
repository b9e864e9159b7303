"""The daemon's children: the one place that spawns processes and the one place that reaps them.

A shim is a subreaper, so it inherits processes that it never spawned: container inits and execs, which the OCI
runtime starts and leaves behind. Any second caller of waitpid(2) would steal exit statuses from the first; that is
why subprocess and asyncio's child watchers are not used in addition to this module.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import partial
from pathlib import Path
from typing import NoReturn

from kybernate_shim.linux import libc, prctl, sealed_program

END_POLL_SECONDS = 0.005
KILLED = 137  # the status of a process whose end was not observed: as if by SIGKILL
OUTPUT_LIMIT = 64 * 1024  # the tail of a program's output that is kept for its error message


@dataclass(frozen=True)
class Exit:
    """How a process ended. `status` is the exit code, or 128 + the signal's number; `at_ns` is UNIX time."""

    pid: int
    status: int
    at_ns: int


@dataclass(frozen=True)
class Finished:
    """What a helper program left behind: its exit status and the last 64 KiB of each output."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str


class ProgramTimedOut(Exception):
    """A helper program outlived its deadline and was killed together with its process group.

    Unless it has `ended`, it waits in the kernel, where no signal reaches it: for a filesystem, say, whose server is a
    container's own process and does not answer.
    """

    def __init__(self, argv: Sequence[str], seconds: float, *, ended: bool = True) -> None:
        held = "" if ended else "; it has not ended yet: the kernel holds it, as when a filesystem does not answer"
        super().__init__(f"{' '.join(argv)}: killed, because it did not end within {seconds:g} s{held}")


@dataclass(eq=False)
class Child:
    """A spawned process, leader of its own session. `exited` resolves once, when it has been reaped."""

    pid: int
    exited: asyncio.Future[Exit]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the whole process group; a group that is gone already is no error."""
        if not self.exited.done():
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    async def end(self, *, seconds: float = 5) -> None:
        """Kill the process group, and wait until it is gone: what its leader has started may outlive it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            await asyncio.sleep(END_POLL_SECONDS)


@dataclass(eq=False)  # collectors of concurrent calls are often equal, and each must close its own
class EarlyExits:
    """Exits of processes that no caller claimed while this collector was open."""

    _exits: dict[int, Exit] = field(default_factory=dict)

    def add(self, exit_: Exit) -> None:
        self._exits[exit_.pid] = exit_

    def take(self, pid: int) -> Exit | None:
        return self._exits.pop(pid, None)


class Children:
    """Spawns, claims and reaps. Lives on one event loop; no method may be called from another thread."""

    def __init__(self) -> None:
        self._spawned: dict[int, Child] = {}
        self._claimed: dict[int, Callable[[Exit], None]] = {}
        self._collectors: list[EarlyExits] = []

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reap from now on, whenever the kernel says SIGCHLD."""
        loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        fds: Mapping[int, int] | None = None,
        cwd: Path | None = None,
        umask: int | None = None,
    ) -> Child:
        """Start `argv` (looked up in PATH of `env`) and return immediately.

        `fds` maps the child's descriptor numbers to ours; 0, 1 and 2 are /dev/null where it does not name them. Python
        opens every other descriptor close-on-exec, so none is inherited. The child leads its own session, with
        default signal handling, and has the given `umask` and working directory, or ours.
        Raises FileNotFoundError or PermissionError when the program cannot be executed, or there is no such directory.
        """
        environment = dict(os.environ if env is None else env)
        # Copies above the range that a child uses, so that no dup2 overwrites the source of a later one; and no higher,
        # for the kernel stops a process with threads for 15 ms when its table of descriptors has to grow.
        above = max((2, *(fds or {}))) + 1
        wanted = {number: fcntl(fd, F_DUPFD_CLOEXEC, above) for number, fd in (fds or {}).items()}
        actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
            (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2) if number not in wanted
        ]
        actions += [(os.POSIX_SPAWN_DUP2, copy, number) for number, copy in wanted.items()]

        def spawn_from(path: str) -> int:
            return os.posix_spawn(
                path,
                list(argv),
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT),
            )

        try:
            path = _find(argv[0], environment)
            spawn = partial(_spawn, spawn_from, path)
            pid = _in_directory(cwd, spawn) if umask is None else _with_umask(umask, cwd, spawn)
        finally:
            for copy in wanted.values():
                os.close(copy)
        child = Child(pid, asyncio.get_running_loop().create_future())
        self._spawned[pid] = child
        return child

    def fork(self, work: Callable[[], int]) -> Child:
        """Run `work` in a copy of this process, which ends with the status that it returns, and do not wait for it.

        An exception is status 1. The copy has all descriptors and none of the threads: `work` must not wait for a lock,
        an import or the event loop. It leads a process group, with default signal handling, and ends with the daemon.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _be_copy(work, parent)
            with suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # the copy does the same: whichever is first, it can be ended from now on
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        child = Child(pid, asyncio.get_running_loop().create_future())
        self._spawned[pid] = child
        return child

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        fds: Mapping[int, int] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        cwd: Path | None = None,
        umask: int | None = None,
    ) -> Finished:
        """Run `argv` to its end and return what it printed on those of fds 1 and 2 that `fds` leaves free.

        Raises ProgramTimedOut after `timeout` seconds; the program is dead and reaped by then, but for one that the
        kernel holds. A cancelled caller leaves no program behind either, and one that failed no process of its group: a
        runtime that was killed leaves a CRIU that would continue.
        """
        # Files in memory instead of pipes: nothing has to be pumped, and a background process that keeps the
        # descriptor open cannot hold us up.
        own = {number: os.memfd_create(f"fd{number}") for number in (1, 2) if number not in (fds or {})}
        if stdin is not None:
            own[0] = os.memfd_create("stdin")
            os.pwrite(own[0], stdin, 0)
        try:
            child = self.spawn(argv, env=env, fds={**own, **(fds or {})}, cwd=cwd, umask=umask)
            ended = await self._end_of(child, argv, timeout)
            return Finished(tuple(argv), ended.status, _tail(own.get(1)), _tail(own.get(2)))
        finally:
            for fd in own.values():
                os.close(fd)

    async def _end_of(self, child: Child, argv: Sequence[str], timeout: float | None) -> Exit:
        try:
            ended = await asyncio.wait_for(asyncio.shield(child.exited), timeout)
        except TimeoutError:
            await child.end()
            raise ProgramTimedOut(argv, timeout or 0, ended=child.exited.done()) from None
        except asyncio.CancelledError:
            await child.end()
            raise
        if ended.status:
            await child.end()
        return ended

    @contextmanager
    def early_exits(self) -> Iterator[EarlyExits]:
        """Collect exits of unclaimed processes while a runtime starts one whose pid is not known yet.

        A process may be dead before the runtime that started it has returned; without the collector its status would
        be lost and the container would look alive forever.
        """
        collector = EarlyExits()
        self._collectors.append(collector)
        try:
            yield collector
        finally:
            self._collectors.remove(collector)

    def claim(self, pid: int, on_exit: Callable[[Exit], None]) -> None:
        """Call `on_exit` once, when the inherited process `pid` is reaped."""
        self._claimed[pid] = on_exit

    def disclaim(self, pid: int) -> None:
        self._claimed.pop(pid, None)

    def reap(self) -> None:
        """Collect every child that has ended. Safe to call at any time."""
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            try:
                self._ended(Exit(pid, _status(code), time.time_ns()))
            except Exception as error:  # noqa: BLE001  # of one exit's handler: the others are there to be reaped
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"the exit of process {pid} was not handled", "exception": error}
                )

    def _ended(self, exit_: Exit) -> None:
        if child := self._spawned.pop(exit_.pid, None):
            if not child.exited.done():
                child.exited.set_result(exit_)
        elif on_exit := self._claimed.pop(exit_.pid, None):
            on_exit(exit_)
        else:
            for collector in self._collectors:
                collector.add(exit_)


def _be_copy(work: Callable[[], int], parent: int) -> NoReturn:
    """Run `work` and end. Signals are blocked until nothing is left by which they would reach the daemon's loop."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        prctl.prctl(prctl.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() == parent:
            status = work()
    finally:
        os._exit(status)


def _status(code: int) -> int:
    return 128 + os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)


def _spawn(spawn_from: Callable[[str], int], path: str) -> int:
    """Execute the program from sealed memory, or from its file where that is not to be or the system forbids it."""
    if (in_memory := sealed_program.executable(path)) != path:
        try:
            return spawn_from(in_memory)
        except OSError:
            sealed_program.forget()
    return spawn_from(path)


def _in_directory(cwd: Path | None, spawn: Callable[[], int]) -> int:
    """Call `spawn` in that working directory, and return to ours: posix_spawn(3), as Python has it, can set none.

    All threads share it, but none of the daemon's looks for a file by a relative path, except where it has its own.
    """
    if cwd is None:
        return spawn()
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(cwd)
        try:
            return spawn()
        finally:
            os.fchdir(before)
    finally:
        os.close(before)


def _with_umask(umask: int, cwd: Path | None, spawn: Callable[[], int]) -> int:
    """Call `spawn` in a thread with its own umask: ours applies to all threads, which create files in the meantime."""
    from concurrent.futures import ThreadPoolExecutor  # only checkpoints need it

    from kybernate_shim.linux.libc import unshare

    def alone() -> int:
        unshare(libc.CLONE_FS)  # umask, working directory and root
        os.umask(umask)
        return _in_directory(cwd, spawn)

    with ThreadPoolExecutor(1, "spawn") as thread:
        return thread.submit(alone).result()


def _find(program: str, env: Mapping[str, str]) -> str:
    """Return the path of `program` as the child's PATH gives it; posix_spawnp would use ours."""
    if "/" in program:
        return program
    for directory in env.get("PATH", os.defpath).split(os.pathsep):
        path = Path(directory or ".") / program
        if os.access(path, os.X_OK) and path.is_file():
            return str(path)
    raise FileNotFoundError(f"{program}: not found in PATH={env.get('PATH', os.defpath)}")


def _tail(memfd: int | None) -> str:
    if memfd is None:
        return ""
    size = os.fstat(memfd).st_size
    return os.pread(memfd, OUTPUT_LIMIT, max(0, size - OUTPUT_LIMIT)).decode(errors="replace")
