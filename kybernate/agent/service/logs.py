"""The output of containers, for operators: which file has it, and how many callers read at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Final

from kybernate.messages import agent_pb2 as wire
from kybernate.node.container_log import Line, LogFile
from kybernate.node.failure import Missing, Refused

FOLLOWED: Final = 64  # logs that are read at a time, by all callers together
POLL_SECONDS: Final = 0.2
MESSAGE_LINES: Final = 500


class Logs:
    """`path_of` returns the file of a container, by containerd's namespace and id; `is_there` whether it exists."""

    def __init__(self, path_of: Callable[[str, str], Awaitable[str]], is_there: Callable[[str, str], bool]) -> None:
        self._path_of, self._is_there = path_of, is_there
        self._reading = 0

    async def read(self, container: wire.Container, count: int, *, follow: bool) -> AsyncGenerator[wire.LogLines, None]:
        """Yield the last lines of a container's output, then those that follow. Raises Missing and Refused."""
        namespace, id = container.namespace, container.id
        path = await self._path_of(namespace, id)
        if not path:
            raise Missing(
                f"the output of {container.title} is in no file",
                advice="it goes to what started the container: a terminal, or a program that containerd passes it to",
            )
        if self._reading >= FOLLOWED:
            raise Refused(f"{FOLLOWED} logs are already being read", advice="try again later")
        self._reading += 1
        try:
            lines = _lines(LogFile(Path(path)), count, follow, lambda: self._is_there(namespace, id))
            async with aclosing(lines) as all:
                async for some in all:
                    yield some
        finally:
            self._reading -= 1


async def _lines(
    log: LogFile, count: int, follow: bool, is_there: Callable[[], bool]
) -> AsyncGenerator[wire.LogLines, None]:
    """Yield what is there now. With `follow`, yield what comes, too, once more after the container has gone: what it
    wrote at last is there then.
    """
    try:
        found = await asyncio.to_thread(log.tail, count)
        while True:
            for start in range(0, len(found), MESSAGE_LINES):
                yield wire.LogLines(lines=map(_message, found[start : start + MESSAGE_LINES]))
            if not follow:
                break
            if not found and log.at_end:
                if not is_there():
                    break
                await asyncio.sleep(POLL_SECONDS)
            found = await asyncio.to_thread(log.more)
    finally:
        log.close()


def _message(line: Line) -> wire.LogLine:
    message = wire.LogLine(stream=line.stream, text=line.text, cut=line.cut)
    if line.time:
        message.time.FromNanoseconds(round(line.time * 1e9))
    return message
