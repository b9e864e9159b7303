"""A verb: one class with everything about one thing that can be asked for. Each has a module of its own.

The engine and the command line know this interface alone; `every.VERBS` is the list.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kybernate.node.failure import Invalid
from kybernate.verbs.model import Arguments, Observation, Operation, Report, Result, Seen, Target

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt
    from kybernate.verbs.node import Node

MOST_TEXT: Final = 4096  # characters, as of a path
MOST_SECONDS: Final = 365 * 86400.0
OPERATOR, PROXY = "operator", "proxy"  # names of roles

Heard = Callable[[Report], None]


@dataclass(frozen=True)
class Verb(Arguments):
    """The arguments of one request, and what is done with them.

    `call` is the RPC, "Service/Method", and `request` its message, whose fields have the names of the verb's own, but
    for those in `renamed`. `roles` may call it. Methods that block are called in threads.
    """

    call: ClassVar[str]
    request: ClassVar[type[Message]]
    renamed: ClassVar[Mapping[str, str]] = {}
    roles: ClassVar[frozenset[str]] = frozenset({OPERATOR})

    @classmethod
    def of(cls, request: Any) -> Self:
        """Return what a request asks for. An empty text means the field's default, a duration becomes seconds."""
        found = {}
        for field in fields(cls):
            value = getattr(request, cls.renamed.get(field.name, field.name))
            if isinstance(value, Duration):
                value = value.seconds + value.nanos / 1e9
            found[field.name] = field.default if value == "" and field.default is not MISSING else value
        return cls(**found)

    def require_valid(self) -> None:
        """Raise Invalid, with the field, for what no node could do."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                require(len(value) <= MOST_TEXT, field.name, f"has more than {MOST_TEXT} characters")
                require("\0" not in value, field.name, "has a character that no name has")
                require(bool(value) or field.default is not MISSING, field.name, "is empty")
            elif isinstance(value, float | int):
                require_seconds(field.name, float(value))
        for name, fault in self.problems():
            require(False, name, fault)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield fields, each with what is wrong with it, beyond what holds for all texts and numbers."""
        return iter(())

    def meant(self, node: Node) -> Verb:
        """Return the verb that the request comes to as the node is now. Blocks; raises Failure."""
        return self

    def resolve(self, node: Node, id: str) -> Target:
        """Return what the request means on this node, for the operation `id`. Blocks; changes nothing; raises Failure.

        Places are decided here, and nothing may be there yet. So a whole image or archive at its place proves
        afterwards that the operation has succeeded.
        """
        raise NotImplementedError

    async def execute(self, attempt: Attempt) -> Result:
        """Carry it out, or wait for the end of what a shim already does for this operation's id.

        Raises Failure, OperationUndone after `cancel`, and OutcomeUnknown where it may or may not have happened.
        """
        raise NotImplementedError

    async def cancel(self, node: Node, operation: Operation, ended: asyncio.Event) -> None:
        """Ask others to end the attempt, where `check` does not; `ended` is set when it has ended. Raises Failure."""

    async def observe(self, node: Node, operation: Operation) -> Observation:
        """Return what became of an operation that had begun; one that is AT_WORK in a shim is not waited for."""
        return Observation(Seen.ABSENT, "it leaves nothing behind")

    async def roll_back(self, node: Node, operation: Operation) -> str:
        """Remove what a HALF_DONE operation has left, and return what that was, in words. Raises Failure."""
        return "nothing was left"


def require(holds: bool, field: str, fault: str) -> None:
    """Raise Invalid with the field unless it holds."""
    if not holds:
        raise Invalid(f"{field} {fault}", state="no operation was started")


def require_seconds(name: str, seconds: float) -> None:
    """Raise Invalid for what is not a number of seconds up to a year."""
    require(math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS, name, "is not a number of seconds up to a year")
