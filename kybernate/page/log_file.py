"""The file to which containerd writes the output of a pod's container, as kubelet names it.

`/var/log/pods/NAMESPACE_POD_UID/CONTAINER/N.log`, of which each line is "TIME STREAM TAG TEXT". The tenant writes the
text and chooses the names, which are names of Kubernetes objects or they name no directory here. Each start of the
container has a file of its own, and kubelet rotates the newest: another file gets its name.
Source: the CRI's logging format, kubernetes/design-proposals-archive/node/kubelet-cri-logging.md.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from kybernate.page.source import LogAbsent
from kybernate.page.view import Container

PODS: Final = Path("/var/log/pods")
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)  # of a Kubernetes object
TAIL_BYTES: Final = 64 << 10  # that are shown of what was written before
READ_BYTES: Final = 64 << 10  # at a time
LINE_CHARACTERS: Final = 2_000  # of a line that are shown
POLL_SECONDS: Final = 0.5


async def follow(container: Container, pods: Path = PODS) -> AsyncIterator[str]:
    """Yield the text of the last lines of a container's log and of those that follow.

    Continues with the next file when kubelet has rotated one. Raises LogAbsent.
    """
    async for line in follow_file(_directory(container, pods)):
        yield line


async def follow_file(directory: Path, *, tail: int | None = TAIL_BYTES, ends: bool = False) -> AsyncIterator[str]:
    """Yield the text of the last lines in a directory's newest log, all where `tail` is None, and of what follows.

    With `ends`, it ends where the log does. Raises LogAbsent.
    """
    descriptor = _open_newest(directory)
    try:
        size = os.fstat(descriptor).st_size
        begin = max(0, size - tail) if tail is not None else 0
        os.lseek(descriptor, begin, os.SEEK_SET)
        cut, rest = begin > 0, b""  # whether the first line is the end of one
        while True:
            data = os.read(descriptor, READ_BYTES)
            if not data:
                if ends:
                    return
                if _is_old(descriptor, directory):
                    newer = _open_newest(directory)
                    os.close(descriptor)
                    descriptor, rest = newer, b""
                else:
                    await asyncio.sleep(POLL_SECONDS)
                continue
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-READ_BYTES:]
            for line in lines[1:] if cut else lines:
                yield text_of(line)
            cut = cut and not lines
            await asyncio.sleep(0)  # a container that writes faster than this reads leaves others their turn
    finally:
        os.close(descriptor)


def text_of(line: bytes) -> str:
    """Return the text of a line of the log; a line of another form is its own text."""
    parts = line.split(b" ", 3)
    text = parts[3] if len(parts) == 4 and parts[1] in (b"stdout", b"stderr") else line
    return text[: 4 * LINE_CHARACTERS].decode("utf-8", "replace")[:LINE_CHARACTERS]


def _directory(container: Container, pods: Path) -> Path:
    names = (container.pod_namespace, container.pod, container.name)
    if not all(NAME.fullmatch(name) for name in names):
        raise LogAbsent(f"{container.title} is not the container of a pod")
    namespace, pod, name = names
    try:
        found = [one for one in pods.glob(f"{namespace}_{pod}_*/{name}") if one.is_dir()]
        return max(found, key=lambda one: one.stat().st_mtime)
    except (OSError, ValueError) as error:
        raise LogAbsent(f"there is no readable log of {container.title} in {pods}") from error


def _newest(directory: Path) -> Path:
    """Return the file of the newest start; that of the first where there is none."""
    try:
        numbers = [int(one.stem) for one in directory.glob("*.log") if one.stem.isascii() and one.stem.isdigit()]
    except OSError:
        numbers = []
    return directory / f"{max(numbers, default=0)}.log"


def _is_old(descriptor: int, directory: Path) -> bool:
    """Return whether another file is the newest one now; False while there is none, between two steps of a rotation."""
    try:
        newest, read = _newest(directory).lstat(), os.fstat(descriptor)
    except OSError:
        return False
    return (newest.st_dev, newest.st_ino) != (read.st_dev, read.st_ino)


def _open_newest(directory: Path) -> int:
    path = _newest(directory)
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LogAbsent(f"the log {path} cannot be opened: {error.strerror}") from error
