"""What all tiers have in common: images are found, received whole or not at all, and removed.

Images go from any tier into one that keeps files. Into an object store they go from a tier that keeps files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # libraries of the extra `store`, which no restore of an image on this node needs
    from kybernate.store.reader import Sink
    from kybernate.store.transfer import Transfer

IMAGE_DIFFERS_ADVICE: Final = "remove it there, or give one of the two another name"


@dataclass(frozen=True)
class Ref:
    """An image: the namespace of its pod, "" for none, the name of its directory, and the id of its manifest."""

    namespace: str
    name: str
    id: str

    @property
    def path(self) -> str:
        """Return where its directory is, relative to that of all images."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Held:
    """A complete image in a tier: bytes of all its files, and its place, a directory or a URL."""

    ref: Ref
    bytes: int
    place: str


@dataclass(frozen=True)
class Room:
    """Bytes of a tier. `capacity` is 0 where there is no limit; `used` are those of images."""

    capacity: int = 0
    free: int = 0
    used: int = 0


class Have(Protocol):
    """What a receiver has already, of a transfer that was interrupted."""

    def has(self, file: str, offset: int, size: int) -> bool:
        """Return whether these bytes of a file need not come again."""


class Source(Protocol):
    """An image that is read."""

    @property
    def ref(self) -> Ref: ...

    @property
    def manifest(self) -> bytes:
        """The bytes of its signed manifest."""

    @property
    def directory(self) -> Path | None:
        """The directory of its files; None where they are elsewhere."""

    async def pour(self, sink: Sink, transfer: Transfer, have: Have) -> None:
        """Give `sink` all bytes of the files that the receiver does not have. Raises Failure and OSError."""

    async def close(self) -> None: ...


class Tier(Protocol):
    """A place for images. `level` is 1 for memory, 2 for disks, 3 for what is reached over a network."""

    @property
    def name(self) -> str: ...

    @property
    def level(self) -> int: ...

    @property
    def durable(self) -> bool:
        """Whether what it has survives a power failure of the node."""

    def images(self) -> AsyncIterator[Held]:
        """Yield what it has, in no order. Raises Failure where it cannot be examined."""

    async def find(self, ref: Ref) -> Held:
        """Return what it has of an image. Raises NoImage."""

    async def open(self, ref: Ref) -> Source:
        """Open an image. Raises NoImage."""

    async def receive(self, source: Source, transfer: Transfer) -> Held:
        """Take over an image, which is there when this returns, and not before. One that is there already is fine.

        A second call continues where one that was cancelled or failed has stopped. Raises Failure, StoreFull,
        ImageDamaged, and what the source raises.
        """

    async def discard(self, ref: Ref) -> None:
        """Remove what a transfer has left that will not be continued."""

    async def verify(self, ref: Ref) -> None:
        """Make sure that an image could be restored from here. Raises NoImage, ImageDamaged, and OSError."""

    async def remove(self, ref: Ref) -> None:
        """Remove an image; one that is not there is fine."""

    async def room(self) -> Room:
        """Return how much it has."""
