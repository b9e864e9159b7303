"""What the engine needs of the node: the interface between deciding about operations and carrying them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kybernate.verbs.model import Arguments, Observation, Operation, Report, Result, Target

Heard = Callable[[Report], None]


class Executor(Protocol):
    """Carries operations out. Every method may be called again for the same operation, also after a crash."""

    @property
    def verbs(self) -> Mapping[str, type[Arguments]]:
        """Return the arguments of all operations that the journal may have, by the names of their verbs."""

    async def meant(self, arguments: Arguments) -> Arguments:
        """Return what a request comes to as the node is now. Raises Failure."""

    async def resolve(self, id: str, arguments: Arguments) -> Target:
        """Return what a request means here, for the new operation `id`, without changing anything.

        Raises Failure where it cannot be carried out: an unknown container, a path that is taken.
        """

    async def execute(self, operation: Operation, heard: Heard) -> Result:
        """Carry it out, or wait for the end of what a shim already does for this operation's id.

        Raises Failure, OperationUndone after `cancel`, and OutcomeUnknown where it may or may not have happened.
        """

    async def cancel(self, operation: Operation) -> None:
        """Ask for its end, and return without waiting for that. Raises Failure where it cannot be asked for."""

    async def observe(self, operation: Operation) -> Observation:
        """Return what became of an operation that had begun; one that is AT_WORK in a shim is not waited for."""

    async def roll_back(self, operation: Operation) -> str:
        """Remove what a HALF_DONE operation has left, and say what that was. Raises Failure."""
