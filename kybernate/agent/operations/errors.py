"""What a caller of the operations can do something about, and the facts with which an operation can fail by itself."""

from __future__ import annotations

from kybernate.node.failure import Failure


class OperationNotFound(Failure):
    """There is no operation with this id. Ended ones are removed after some days."""

    advice = "`kybernate ops` lists the operations"


class KeyReused(Failure):
    """The idempotency key belongs to another request."""

    advice = "use a new key for each new request, and the same one only to repeat a request"


class TooManyOperations(Failure):
    """So many operations wait already that no more are taken."""

    advice = "wait until some of them have ended, or cancel them; `kybernate ops` lists them"


class AgentStopping(Failure):
    """The agent is about to end and takes no operations any more."""

    advice = "repeat the request, with the same idempotency key, when the agent runs again"


class PathClaimed(Failure):
    """Another operation that has not ended writes to the same place."""

    advice = "name another place, or wait for that operation"


class DeadlinePassed(Failure):
    """The operation had not ended at its deadline."""

    advice = "give it more time, or find out what it waited for: `kybernate ops` shows steps and notes"


class GivenUp(Failure):
    """The agent began the operation several times, and never learned its outcome."""

    advice = "the notes of the operation and the agent's log say what ended it each time"
