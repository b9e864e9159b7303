"""Runs an OCI runtime's commands and turns its failures into errors with its own messages.

A runtime writes its messages to its log. People search the web for them, so they are passed on unchanged. Where there
is none, the error names the command, how it ended, and the end of its stderr.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kybernate_shim.config import Deadlines
from kybernate_shim.errors import Missing
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.children import Finished, ProgramTimedOut
from kybernate_shim.linux.private_files import NO_OTHERS
from kybernate_shim.oci import freezer, log, signals
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.commands import Cli, Criu
from kybernate_shim.oci.exec_fifo import exec_fifo, executed, program_of, release
from kybernate_shim.oci.options import RuntimeOptions

STDERR_LINES = 20
FULL_BYTES = 64 * 1024  # with less than this left, a runtime may have been unable to write its log
# Regular expressions for runtimes' messages about a container that they do not know (runc and newer crun; older crun),
# and about one whose processes have ended.
MISSING = r"does not exist|(opening file|open directory) [`'].*No such file or directory"
ENDED = r"process already finished|(container|is) not running|no such process|not found"


class RuntimeFailed(Exception):
    """The OCI runtime could not execute a command. `status` is None if it never ran or was killed."""

    def __init__(self, verb: str, message: str, status: int | None = None) -> None:
        super().__init__(f"OCI runtime {verb} failed: {message}")
        self.verb = verb
        self.message = message
        self.status = status


class RuntimeTimedOut(RuntimeFailed):
    """The OCI runtime did not end before its deadline and was killed; its work may be half done."""


class RuntimeRunner(Protocol):
    """Runs a program to its end, as `kybernate_shim.linux.children.Children` does."""

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
    ) -> Finished: ...


def runtime_environment(env: Mapping[str, str], criu: Path | None = None) -> dict[str, str]:
    """Return `env` as a runtime should see it.

    Without NOTIFY_SOCKET, because runc would announce the container to systemd in containerd's place; and with CRIU's
    directory first in PATH, the only way in which every version of runc finds a chosen CRIU.
    """
    result = {name: value for name, value in env.items() if name != "NOTIFY_SOCKET"}
    if criu is not None:
        result["PATH"] = f"{criu.parent}:{result['PATH']}" if result.get("PATH") else str(criu.parent)
    return result


@dataclass(frozen=True)
class Runtime:
    """The OCI runtime of one container. Raises RuntimeFailed from every method, RuntimeTimedOut among them.

    `fds` in create, exec and restore maps 0, 1 and 2 to the descriptors that become the process's stdio; a number left
    out becomes /dev/null. With a terminal they are unused, and the runtime sends its master to `console_socket`.
    `directory` is where it runs: the bundle, as under containerd's own shim. Programs that wrap runc look for
    config.json and init.pid there, and so do hooks.
    """

    cli: Cli
    children: RuntimeRunner
    env: Mapping[str, str]
    deadlines: Deadlines = field(default_factory=Deadlines)
    directory: Path | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    async def create(
        self,
        container: str,
        bundle: Bundle,
        *,
        fds: Mapping[int, int],
        console_socket: Path | None = None,
        options: RuntimeOptions | None = None,
    ) -> None:
        """Create init, so that only `start` is missing; its pid is in `bundle.init_pid_file` afterwards.

        After a failure the runtime may know the container: `delete` it with force.
        """
        options = options or RuntimeOptions()
        argv = self.cli.create(
            container,
            bundle.path,
            bundle.init_pid_file,
            console_socket=console_socket,
            no_pivot=options.no_pivot_root,
            no_new_keyring=options.no_new_keyring,
        )
        with _stdio(fds, console_socket) as stdio:
            await self._run("create", argv, self.deadlines.create, fds=stdio)

    async def start(self, container: str, *, waiting: int | None = None) -> None:
        """Let init execute its program; without the runtime's help, if init is `waiting` for that, with this pid.

        Where its pid is known, init executes the program on return, or has ended.
        """
        before = program_of(waiting) if waiting else None
        if not (waiting and await self._release(container, waiting)):
            await self._run("start", self.cli.start(container), self.deadlines.start)
        if waiting:
            await executed(waiting, before, self.deadlines.start)

    async def _release(self, container: str, init: int) -> bool:
        """Let init execute its program without the runtime's help; return False where the runtime has to do that."""
        fifo = exec_fifo(self.cli, container, init)
        try:
            return fifo is not None and await release(fifo, init, self.deadlines.start)
        except TimeoutError as error:
            said = f"init (pid {init}) has not executed its program {self.deadlines.start:g} s after it was started"
            raise RuntimeTimedOut("start", said) from error

    async def exec(
        self,
        container: str,
        bundle: Bundle,
        exec_id: str,
        *,
        fds: Mapping[int, int],
        console_socket: Path | None = None,
    ) -> None:
        """Start the process of `bundle.process_file(exec_id)`; its pid is in `bundle.exec_pid_file` afterwards."""
        with self._own_log() as cli, _stdio(fds, console_socket) as stdio:
            argv = cli.exec(
                container,
                bundle.process_file(exec_id),
                bundle.exec_pid_file(exec_id),
                console_socket=console_socket,
            )
            await self._run("exec", argv, self.deadlines.exec, fds=stdio, log_file=cli.log)

    async def kill(
        self,
        container: str,
        number: int,
        *,
        all: bool = False,  # runc's word
        init: int = 0,
        cgroup: Cgroup | None = None,
    ) -> None:
        """Send a signal to init, or to all processes. Raises Missing when there is nothing left to signal.

        Without the runtime's help, if the pid of an `init` that is not reaped is given, with its `cgroup`, and the
        signal is for init alone: a busy machine takes seconds to execute a program.
        """
        if init and not all and signals.send(self.cli, init, number, cgroup):
            return
        with self._own_log() as cli, _named(Missing, ENDED, MISSING):
            argv = cli.kill(container, number, all=all)
            await self._run("kill", argv, self.deadlines.kill, log_file=cli.log)

    async def delete(self, container: str, *, force: bool = False) -> None:
        """Remove the container. Raises Missing when the runtime does not know it (never with `force`)."""
        with _named(Missing, MISSING):
            await self._run("delete", self.cli.delete(container, force=force), self.deadlines.delete)

    async def pause(self, container: str, cgroup: Cgroup | None = None) -> None:
        """Stop all processes; without the runtime's help, if their `cgroup` is given and nothing else is to be done."""
        try:
            if await freezer.freeze(self.cli, cgroup, self.deadlines.freeze):
                return
        except TimeoutError as error:
            raise RuntimeTimedOut("pause", str(error)) from error
        await self._run("pause", self.cli.pause(container), self.deadlines.freeze)

    async def resume(self, container: str, cgroup: Cgroup | None = None) -> None:
        """Thaw them, in the same way."""
        if not freezer.thaw(self.cli, cgroup):
            await self._run("resume", self.cli.resume(container), self.deadlines.freeze)

    async def update(self, container: str, resources: bytes) -> None:
        """Apply OCI LinuxResources, as JSON."""
        await self._run("update", self.cli.update(container), self.deadlines.update, stdin=resources)

    async def checkpoint(
        self, container: str, criu: Criu, *, leave_running: bool, empty_ns: Sequence[str] = ()
    ) -> None:
        """Write CRIU's images. Without `leave_running`, the container is gone afterwards, also for the runtime.

        No other user can read what is written. A restore keeps our umask: the runtime makes mount points, and
        hooks make files, in the container's root filesystem, whose modes its programs see.
        """
        argv = self.cli.checkpoint(container, criu, leave_running=leave_running, empty_ns=empty_ns)
        await self._run("checkpoint", argv, self.deadlines.checkpoint, umask=NO_OTHERS)

    async def restore(
        self,
        container: str,
        bundle: Bundle,
        criu: Criu,
        *,
        fds: Mapping[int, int],
        console_socket: Path | None = None,
        options: RuntimeOptions | None = None,
    ) -> None:
        """Restore init and run it; its pid is in `bundle.init_pid_file` afterwards.

        nvidia-container-runtime passes this through without its edits of config.json; the caller has made them.
        """
        argv = self.cli.restore(
            container,
            bundle.path,
            bundle.init_pid_file,
            criu,
            console_socket=console_socket,
            no_pivot=bool(options and options.no_pivot_root),
        )
        with _stdio(fds, console_socket) as stdio:
            await self._run("restore", argv, self.deadlines.restore, fds=stdio)

    # ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _own_log(self) -> Iterator[Cli]:
        """Give a call that may run concurrently with others a separate log, so that errors of others are not in it."""
        if self.cli.log is None:
            yield self.cli
            return
        path = self.cli.log.with_name(f".{self.cli.log.name}.{next(self._numbers)}")
        try:
            yield replace(self.cli, log=path)
        finally:
            path.unlink(missing_ok=True)

    async def _run(
        self,
        verb: str,
        argv: Sequence[str],
        deadline: float,
        *,
        fds: Mapping[int, int] | None = None,
        stdin: bytes | None = None,
        log_file: Path | None = None,
        umask: int | None = None,
    ) -> Finished:
        log_file = log_file or self.cli.log
        before = log.size(log_file) if log_file else 0
        try:
            finished = await self.children.run(
                argv, env=self.env, fds=fds, stdin=stdin, timeout=deadline or None, cwd=self.directory, umask=umask
            )
        except ProgramTimedOut as error:
            said = log.last_error(log_file, before) if log_file else ""
            raise RuntimeTimedOut(verb, f"{error}{f'; it wrote: {said}' if said else ''}") from error
        except OSError as error:
            where = f" in {self.directory}" if self.directory else ""
            raise RuntimeFailed(verb, f"{argv[0]} cannot be executed{where}: {error.strerror or error}") from error
        if finished.status != 0:
            said = log.last_error(log_file, before) if log_file else ""
            raise RuntimeFailed(verb, said or _obituary(finished, heard=not fds) + _shortage(log_file), finished.status)
        return finished


@contextmanager
def _named(error: type[Exception], *signs: str) -> Iterator[None]:
    """Raise `error` for a failure whose message shows one of the signs. A killed runtime shows none."""
    try:
        yield
    except RuntimeFailed as failure:
        if failure.status and any(re.search(sign, failure.message, re.IGNORECASE) for sign in signs):
            raise error(failure.message) from failure
        raise


@contextmanager
def _stdio(fds: Mapping[int, int], console_socket: Path | None) -> Iterator[dict[int, int]]:
    """Fill the gaps in `fds` with /dev/null: no container may inherit the files that collect the runtime's output."""
    if console_socket is not None:
        yield {}
        return
    null = os.open(os.devnull, os.O_RDWR)
    try:
        yield {0: null, 1: null, 2: null, **fds}
    finally:
        os.close(null)


def _obituary(finished: Finished, *, heard: bool) -> str:
    """Return how a runtime ended that logged no error.

    `heard` is false where its output went to a container's stdio.
    """
    ending = f"`{' '.join(finished.argv)}` ended with status {finished.status}"
    if finished.status > 128:
        try:
            ending += f" ({signal.Signals(finished.status - 128).name})"
        except ValueError:
            pass  # the runtime's own status, which only looks like a signal
    tail = "\n".join((finished.stderr or finished.stdout).strip().splitlines()[-STDERR_LINES:])
    if tail:
        return f"{ending}: {tail}"
    return f"{ending} and wrote nothing" if heard else ending


def _shortage(log_file: Path | None) -> str:
    """Return a note that the disk is full, if it is: a runtime that cannot write its log fails without a message."""
    if log_file is None:
        return ""
    disk = os.statvfs(log_file.parent)
    free = disk.f_bavail * disk.f_frsize
    return f"; no space left for its log: {free} bytes are free in {log_file.parent}" if free < FULL_BYTES else ""
