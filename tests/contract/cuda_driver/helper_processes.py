"""Finds the processes of a CUDA helper, to look at them and to kill them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from tests.fakes.cuda import Gpus

PATIENCE = 30.0  # s for a call whose deadline is not the subject; the machine may be busy with other tests


def helpers(socket: Path) -> list[psutil.Process]:
    """Return the helper processes of `socket`, oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time", "status"]):
        arguments = process.info["cmdline"] or []
        if str(socket) in arguments and "kybernate_shim.cuda_helper.helper" in arguments:
            found.append(process)
    return sorted(found, key=lambda process: process.info["create_time"])


async def called(gpus: Gpus, verb: str, times: int = 1) -> None:
    """Wait until the driver is in its so-many-th call of a verb since `gpus.record()`."""
    async with asyncio.timeout(PATIENCE):
        while [call.name for call in gpus.calls()].count(verb) < times:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.005)


def arenas_worker(socket: Path) -> psutil.Process:
    """Return the worker that the only helper of `socket` has for the arena."""
    (helper,) = helpers(socket)
    (found,) = [child for child in helper.children() if "arena" in _arguments(child)]
    return found


def _arguments(process: psutil.Process) -> list[str]:
    """Return the words of its command line; none of one that has ended, or is a zombie."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def kill_helper(socket: Path) -> None:
    """Kill the only helper of `socket` and its workers, and remove the socket, so that another can be started."""
    (helper,) = helpers(socket)
    kill([helper, *helper.children(recursive=True)])
    socket.unlink()


def kill_helpers(socket: Path) -> None:
    """Kill all helpers of `socket`, and their workers."""
    for helper in helpers(socket):
        with suppress(psutil.NoSuchProcess):  # it has ended by itself, and took its workers along
            kill([helper, *helper.children(recursive=True)])


def kill_workers(socket: Path) -> None:
    """Kill the workers of the only helper of `socket`."""
    (helper,) = helpers(socket)
    kill(helper.children(recursive=True))


def kill(processes: list[psutil.Process]) -> None:
    """Kill `processes` and wait until they are gone; one that has ended by itself meanwhile is no error."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)
