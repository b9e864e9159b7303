"""Starts a container of runc's without executing runc, whose own start-up would be most of the time.

runc's init, when all is prepared, opens a fifo in the container's state directory, which waits for a reader, and then
executes its program. `runc start` looks whether the container is just created, reads, removes the fifo, and runs the
poststart hooks. Sources: start.go, libcontainer/container_linux.go and standard_init_linux.go of runc 1.1 to 1.5.
Wherever a start may involve anything else, the runtime does it, and reports its own errors.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from contextlib import ExitStack
from pathlib import Path

from kybernate_shim.linux.readiness import until_readable
from kybernate_shim.linux.statx import status_of
from kybernate_shim.oci.commands import Cli

# NVIDIA's runtimes pass everything but `create` on to runc, or to crun, whose state directory looks different.
PROGRAMS = ("runc", "nvidia-container-runtime", "nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy")
POLL_SECONDS = 0.0005
EXEC_SECONDS = 10.0  # within which a program is usually executed: one on a filesystem that hangs may never be
MAGIC = b"\x7fELF"  # begins a compiled program, as opposed to a script of that name, which may do anything at a start


def exec_fifo(cli: Cli, container: str, init: int) -> Path | None:
    """Return the fifo on which the init with that pid waits, if a start would do nothing but read from it."""
    directory = cli.root / container
    fifo = directory / "exec.fifo"
    try:
        if cli.binary.name not in PROGRAMS or not is_compiled(cli.binary) or not stat.S_ISFIFO(fifo.lstat().st_mode):
            return None
        state = (directory / "state.json").read_bytes()
    except OSError:
        return None  # not as we know it
    # Not parsed, which would cost each daemon memory for good. No string of JSON has a quotation mark like these. Where
    # there is no hook, runc up to 1.4 writes null, and newer ones nothing.
    is_plain = b'"init_process_pid":%d,' % init in state and b'"poststart":[' not in state
    return fifo if is_plain else None


async def release(fifo: Path, init: int, seconds: float) -> bool:
    """Let init execute its program. Return False when it cannot, because it has ended.

    Raises TimeoutError after `seconds`, 0 for never. As with runc, init then ends with an error once it runs again.
    """
    with ExitStack() as closing:
        try:
            ended = os.pidfd_open(init)
            closing.callback(os.close, ended)
            reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            closing.callback(os.close, reading)
            async with asyncio.timeout(seconds or None):
                await until_readable(reading, ended)
            if not os.read(reading, 1):
                return False
        except (ProcessLookupError, FileNotFoundError, BlockingIOError):
            return False
    fifo.unlink(missing_ok=True)  # by its absence, runc distinguishes a running container from a created one
    return True


def program_of(pid: int) -> tuple[int, int] | None:
    """Return which file a process executes, None where it has ended or is a zombie."""
    try:
        status = status_of(f"/proc/{pid}/exe")  # on a volume whose server may not answer
    except OSError:
        return None
    return status.st_dev, status.st_ino


async def executed(init: int, before: tuple[int, int] | None, seconds: float) -> None:
    """Wait until init, which executed `before` when it was told to start, executes its program, or has ended.

    The runtime reports a start before that: until then, a signal would reach the runtime's own program, and a
    checkpoint would dump it. Returns after `seconds`, EXEC_SECONDS at most, in any case: the start was requested.
    """
    deadline = time.monotonic() + min(seconds or EXEC_SECONDS, EXEC_SECONDS)
    while before is not None and program_of(init) == before and time.monotonic() < deadline:  # noqa: ASYNC110  # no event
        await asyncio.sleep(POLL_SECONDS)


def is_compiled(program: Path) -> bool:
    """Return whether a program is compiled, and not a script of that name. Raises OSError."""
    with program.open("rb", buffering=0) as file:  # a buffer would be filled, and kept by the daemon
        return file.read(len(MAGIC)) == MAGIC
