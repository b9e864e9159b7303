"""Objects in memory, with the service's clock in the hands of a test, and every call a step that a test may delay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from kybernate.store.errors import ObjectMissing, StoreInvalid, StoreUnreachable
from kybernate.store.objects import MOST_BYTES, Stored
from kybernate.store.parts import WholeParts


class SteppedObjects(WholeParts):
    """All clients of one service share `service`. With `stepped`, a call waits until `release` lets it happen."""

    ranged = True
    lacks: set[str] = set()  # noqa: RUF012  # nothing

    def __init__(self, *, stepped: bool = False) -> None:
        self.contents: dict[str, tuple[bytes, float]] = {}
        self.clock = 1000.0
        self.calls: list[str] = []
        self.fail_after: int | None = None  # calls, then the service is away
        self._stepped = stepped
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def waiting(self) -> int:
        """How many calls wait to happen."""
        return len(self._waiting)

    def release(self, number: int) -> None:
        """Let one of the waiting calls happen."""
        self._waiting.pop(number).set_result(None)

    async def _step(self, call: str) -> None:
        self.calls.append(call)
        if self.fail_after is not None and len(self.calls) > self.fail_after:
            raise StoreUnreachable("the service is away")
        if self._stepped:
            self._waiting.append(future := asyncio.get_running_loop().create_future())
            await future

    async def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        await self._step(f"put {name}")
        self.contents[name] = (bytes(content), self.clock)

    async def create(self, name: str, content: bytes) -> bool:
        await self._step(f"create {name}")
        if name in self.contents:
            return False
        self.contents[name] = (content, self.clock)
        return True

    async def get(self, name: str, *, most: int = MOST_BYTES) -> bytes:
        await self._step(f"get {name}")
        if len(content := self._content(name)) > most:
            raise StoreInvalid(f"{name} has {len(content)} bytes; at most {most} are read")
        return content

    async def get_range(self, name: str, start: int, length: int) -> bytes:
        await self._step(f"get {name}")
        return self._content(name)[start : start + length]

    async def head(self, name: str) -> Stored:
        await self._step(f"head {name}")
        return Stored(name, len(self._content(name)), self.contents[name][1])

    async def locked_until(self, name: str) -> float | None:
        return None

    async def list(self, prefix: str) -> AsyncIterator[Stored]:
        await self._step(f"list {prefix}")
        for name, (content, modified) in sorted(self.contents.items()):
            if name.startswith(f"{prefix}/"):
                yield Stored(name, len(content), modified)

    async def folders(self, prefix: str) -> list[str]:
        await self._step(f"folders {prefix}")
        below = [name.removeprefix(f"{prefix}/") for name in self.contents if name.startswith(f"{prefix}/")]
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    async def copy(self, source: str, target: str) -> None:
        await self._step(f"copy {source} {target}")
        self.contents[target] = (self._content(source), self.clock)

    async def delete(self, names: Sequence[str]) -> None:
        await self._step(f"delete {' '.join(names)}")
        for name in names:
            self.contents.pop(name, None)

    def _content(self, name: str) -> bytes:
        if name not in self.contents:
            raise ObjectMissing(name)
        return self.contents[name][0]


@dataclass(frozen=True)
class MemoryFile:
    """A file of an image, cut into small chunks."""

    name: str
    content: bytes
    chunk: int = 64

    @property
    def size(self) -> int:
        return len(self.content)

    def cuts(self) -> Iterator[tuple[int, int, bool]]:
        for offset in range(0, self.size, self.chunk):
            yield offset, min(self.chunk, self.size - offset), False

    def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


class MemorySink:
    """Collects files."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def write(self, file: str, offset: int, content: bytes | memoryview) -> None:
        self._place(file, offset + len(content))[offset : offset + len(content)] = content

    def zeros(self, file: str, offset: int, size: int) -> None:
        self._place(file, offset + size)

    def _place(self, file: str, end: int) -> bytearray:
        content = self.files.setdefault(file, bytearray())
        content.extend(bytes(max(0, end - len(content))))
        return content
