"""Where the page's data comes from and its actions go to: one interface, of a node today."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

from kybernate.node.failure import Failure
from kybernate.page.view import Change, Container


class Action(StrEnum):
    """What an operator can ask for on the page. The last three name an image, the others a container."""

    WAKE = "wake"
    SLEEP = "sleep"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    PIN = "pin"
    UNPIN = "unpin"

    @property
    def of_image(self) -> bool:
        return self in (Action.RESTORE, Action.PIN, Action.UNPIN)


class ActionRefused(Failure):
    """An action was not begun: its object is unknown, or the source refused it."""


class LogAbsent(Failure):
    """There is no log of a container that the page can read."""

    advice = "what started the container shows it, where it does not write to a file"


class Source(Protocol):
    """A node's agent, or the nodes of a cluster."""

    def changes(self) -> AsyncIterator[Change]:
        """Yield what there is and what changes, without an end: trouble is `Lost`, and is followed by `Found`."""

    async def act(self, action: Action, key: str) -> str:
        """Begin an action, and return a sentence about it. Raises ActionRefused."""

    def log(self, container: Container) -> AsyncIterator[str]:
        """Yield the last lines of a container's output, then those that follow, until it is removed.

        Raises LogAbsent, and Unavailable where the source is away.
        """
