"""The command line without the start of an interpreter: a server that has loaded it forks a process for each command.

A command costs a quarter of a second of a CPU, nearly all of it for imports, and the tests run thousands. The
server's processes run the installed program's own `main` with the caller's arguments, environment, directory and files.
The first command of each name in a run is a program of its own, so that what it loads by itself is tested as well.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "kybernate"
NUMBER = struct.Struct("i")
LARGEST = 1 << 20  # bytes of arguments and environment
# What commands load when they run, not when they are imported: the conversions of arguments, tables, bars; and, for
# those that are read without typer, one of two ways to a shim.
LOADED_LATE = (
    "typer._adapters", "rich.console", "rich.progress", "rich.table", "kybernate.cli.application",
    "kybernate.cli.surveying", "kybernate.client.agent", "kybernate.node.containerd", "kybernate.node.survey",
)  # fmt: skip

_begun: set[str] = set()


def can_run(argv: Sequence[str]) -> bool:
    """Return whether `run` may stand for the program: for a command that has run as one before."""
    if len(argv) < 2 or argv[0] != PROGRAM:
        return False
    if argv[1] in _begun:
        return True
    _begun.add(argv[1])
    return False


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout: float = 60,
    user: int = 0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, as `subprocess.run` does. Raises TimeoutExpired, and the process is killed then.

    `user`: the number of the user and of the only group that the process has. `environment`: in place of the caller's.
    """
    files = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("stdin", "stdout", "stderr")]
    heard, tell = os.pipe()
    try:
        os.write(files[0], stdin)
        os.lseek(files[0], 0, os.SEEK_SET)
        variables = dict(os.environ if environment is None else environment)
        call = {"argv": list(argv), "environment": variables, "directory": str(Path.cwd()), "user": user}
        socket.send_fds(_server(), [json.dumps(call).encode()], [*files, tell])
        os.close(tell)
        status = _status(heard, argv, timeout)
        return subprocess.CompletedProcess(argv, status, *map(_content, files[1:]))
    finally:
        for descriptor in (*files, heard):
            os.close(descriptor)


def _status(heard: int, argv: Sequence[str], timeout: float) -> int:
    """Return the exit status, which the server sends after the pid."""
    pid = _number(heard, timeout)
    status = _number(heard, timeout)
    if status is None:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired(argv, timeout)
    return status


def _number(heard: int, timeout: float) -> int | None:
    """Return the next number that the server sends, None where none comes in time."""
    if not select.select([heard], [], [], timeout)[0]:
        return None
    return int(NUMBER.unpack(os.read(heard, NUMBER.size))[0])


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


@cache
def _server() -> socket.socket:
    """Start the server, which ends with this process, and return where it takes calls.

    It has the interpreter and the modules of the installed program, whatever this process has of a checkout.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    with its:
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(its.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            cwd="/",
        )
    return ours


def serve(calls: socket.socket) -> None:
    """Fork a process for each call, and send its pid and its exit status, until there is no caller any more."""
    from kybernate.cli.commands import COMMANDS

    for name in [*LOADED_LATE, *(f"kybernate.cli.{module}" for module in COMMANDS.values())]:
        importlib.import_module(name)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([calls.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, tell = running.pop(ready)
                _tell(tell, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(tell)
                os.close(ready)
                continue
            call, descriptors, _, _ = socket.recv_fds(calls, LARGEST, 4, socket.MSG_CMSG_CLOEXEC)
            if not call:
                return
            *files, tell = descriptors
            if (pid := os.fork()) == 0:
                _become(json.loads(call), files)
            _tell(tell, pid)
            running[os.pidfd_open(pid)] = pid, tell
            for descriptor in files:
                os.close(descriptor)


def _tell(descriptor: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the caller waits no more
        os.write(descriptor, NUMBER.pack(number))


def _become(call: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Run a command in this process, which ends with it."""
    status = 1
    try:
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(call["directory"])
        os.environ.clear()
        os.environ.update(call["environment"])
        if user := call["user"]:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        sys.argv = call["argv"]
        status = _ending()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ending() -> int:
    """Run the program and return its exit status, after a traceback where the interpreter would have printed one."""
    from kybernate.cli import main

    try:
        main()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001  # this is the end of the process
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads as the interpreter would
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
