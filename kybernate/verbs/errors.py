"""The facts with which a verb can fail by itself, in the agent or in a command."""

from __future__ import annotations

from typing import Final

from kybernate.node.failure import Failure
from kybernate.verbs.model import Fault

NODE_REBOOTED_ADVICE: Final = (
    "the container's processes have ended with the node; start the container, or restore its last image"
)


class OperationUndone(Exception):
    """An operation was undone because it was cancelled; raised by what carries it out."""


class OutcomeUnknown(Exception):
    """The connection to what carries out an operation was lost: what became of it has to be looked up."""


def fault_of(error: BaseException) -> Fault:
    """Return what is kept of an error."""
    if isinstance(error, Failure):
        return Fault(type(error).__name__, str(error), error.state, error.advice).trimmed()
    return Fault(type(error).__name__, str(error) or type(error).__name__).trimmed()
