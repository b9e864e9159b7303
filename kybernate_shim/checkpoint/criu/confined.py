"""Reads CRIU's images in a separate process with limits, because their maker may want to harm the reader.

The process is a copy of the daemon, not a program: an interpreter with protobuf takes 100 ms to start, a copy 3 ms at
most, and a whole restore 300. Only the thread that makes the copy exists in it, so what runs there takes no lock of
another thread: it imports nothing, logs nothing, and leaves by _exit. Should it ever wait for one, its deadline ends
it. It has no descriptor of the daemon's, and answers by JSON in memory, which is checked like any document.
Sources: fork(2); setrlimit(2); pthread_atfork(3), on locks in a copy.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from kybernate_shim.checkpoint.criu import images
from kybernate_shim.checkpoint.criu.credentials import credentials, held
from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.image.codec import from_json, parse, to_json
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.children import Child
from kybernate_shim.linux.credentials import ProcessCredentials
from kybernate_shim.trust.credentials import NeedsCapability

MOST_ANSWER: Final = 32 << 20  # bytes
MOST_THREADS: Final = 1 << 15
MOST_VALUES: Final = 64 * MOST_THREADS
REFUSED: Final = 3  # status of a reader that has found the images to be damaged


@dataclass(frozen=True)
class ImagePrivileges:
    """What the processes of the images have: their threads' credentials, and what only some capabilities make."""

    threads: tuple[ProcessCredentials, ...] = field(default=(), metadata={"most": MOST_THREADS})
    held: tuple[NeedsCapability, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """What is said by the CRIU images of a checkpoint that is to be restored: all that is decided by before CRIU runs.

    `pids` are those in the container, parents before their children. A new field is filled in `examine`; its type must
    be one that codec.py knows.
    """

    pids: tuple[int, ...]
    mounts: tuple[DumpedMount, ...]
    internet_sockets: bool
    root_writable: bool = True
    privileges: ImagePrivileges | None = None


@dataclass(frozen=True)
class ReaderLimits:
    """What a reader may use: memory in addition to the daemon's, in bytes; CPU time and elapsed time, in seconds."""

    memory: int = 256 << 20
    processor_seconds: int = 10
    seconds: float = 30
    open_files: int = 16


class Copier(Protocol):
    """Runs a function in a copy of the process; linux.children.Children does."""

    def fork(self, work: Callable[[], int]) -> Child: ...


async def inspect(
    children: Copier, directory: Path, limits: ReaderLimits | None = None, *, privileges: bool = False
) -> Inspection:
    """Return what the CRIU images in `directory` say. Raises Damaged, also where reading them hits a limit.

    `privileges`: those of the processes, too. A cancelled caller leaves no reader behind.
    """
    limits = limits or ReaderLimits()
    answer = os.memfd_create("inspection")
    try:
        child = children.fork(partial(_answer, partial(examine, directory, privileges=privileges), answer, limits))
        try:
            ended = await asyncio.wait_for(asyncio.shield(child.exited), limits.seconds)
        except TimeoutError:
            await child.end()
            raise Damaged(f"{directory}: CRIU's images were not read within {limits.seconds:g} s") from None
        except asyncio.CancelledError:
            await child.end()
            raise
        if ended.status not in (0, REFUSED):
            raise Damaged(f"{directory}: {_limited(limits)} (the reader ended with status {ended.status})")
        content = os.pread(answer, MOST_ANSWER, 0)
    finally:
        os.close(answer)
    if ended.status == REFUSED:
        raise Damaged(content.decode(errors="replace"))
    try:
        return await asyncio.to_thread(lambda: from_json(Inspection, parse(content, most=MOST_VALUES)))
    except ValueError as error:
        raise Damaged(f"{directory}: CRIU's images are invalid: {error}") from error


@asynccontextmanager
async def inspecting(
    children: Copier, directory: Path, *, privileges: bool = False
) -> AsyncIterator[Awaitable[Inspection]]:
    """Have `inspect` run while the block does other things, and yield what to wait for its result by.

    The copy is made before the block begins, because threads of the block's may hold locks later. Without `privileges`
    the image is the choice of the node's root, whose restores need not wait for a copy: it is read in a thread, within
    the limits of `images`.
    """
    if privileges:
        reading = asyncio.ensure_future(inspect(children, directory, privileges=True))
        await asyncio.sleep(0)
    else:
        reading = asyncio.ensure_future(asyncio.to_thread(examine, directory))
    try:
        yield reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def examine(directory: Path, *, privileges: bool = False) -> Inspection:
    """Read the images, with no limits but those of `images`; `inspect` runs it. Raises Damaged."""
    return Inspection(
        pids=images.pids(directory),
        mounts=images.mounts(directory),
        internet_sockets=images.has_internet_sockets(directory),
        root_writable=images.root_writable(directory),
        privileges=ImagePrivileges(credentials(directory), held(directory)) if privileges else None,
    )


def _limited(limits: ReaderLimits) -> str:
    return (
        f"CRIU's images cannot be read with {limits.memory >> 20} MiB of memory and {limits.processor_seconds} s of"
        " CPU time"
    )


def _answer(work: Callable[[], Any], answer: int, limits: ReaderLimits) -> int:
    """Be the reader: write what `work` returns, or why there is nothing, and return the exit status."""
    gc.disable()  # no finalizer of the daemon's objects runs here, and their memory stays shared
    _keep_only(answer)
    _limit(limits)
    try:
        status, content = 0, json.dumps(to_json(work())).encode()
    except Damaged as error:
        status, content = REFUSED, str(error).encode(errors="replace")[: 4 << 10]
    except MemoryError:
        status, content = REFUSED, _limited(limits).encode()
    while content:
        content = content[os.write(answer, content) :]
    return status


def _keep_only(fd: int) -> None:
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))


def _limit(limits: ReaderLimits) -> None:
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123  # a copy does as little as it can
        size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, most in (
        (resource.RLIMIT_AS, size + limits.memory),
        (resource.RLIMIT_CPU, limits.processor_seconds),
        (resource.RLIMIT_FSIZE, MOST_ANSWER),
        (resource.RLIMIT_NOFILE, max(limits.open_files, 3)),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
