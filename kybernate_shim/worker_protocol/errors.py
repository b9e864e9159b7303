"""What can go wrong between a worker and its client, and how a worker's exceptions reach the client.

A protocol names the classes of exceptions that its workers send. Such an exception arrives as itself, with its notes;
an exception of a derived class arrives as its nearest named base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kybernate_shim.linux.kernel_text import plain

E = TypeVar("E", bound=Exception)


class WorkerError(Exception):
    """A worker cannot be used, or no longer; never raised itself."""


class MessageInvalid(WorkerError):
    """What was sent is not a message of the protocol, or not a job of this worker; the message names the sender."""


@dataclass(frozen=True)
class Fault:
    """An exception as it is sent: the name of its class, its text, its notes."""

    name: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ErrorTypes(Generic[E]):
    """The exceptions that workers of one kind send; what is unknown to the client arrives as `base`."""

    base: type[E]
    others: Sequence[type[E]] = ()

    def fault_of(self, error: BaseException) -> Fault | None:
        """Return what to send for an exception; None if it is not one of these: then it was unexpected."""
        for kind in type(error).__mro__:
            if kind in (MessageInvalid, self.base, *self.others):
                notes = tuple(map(plain, getattr(error, "__notes__", ())))
                return Fault(kind.__name__, plain(str(error)), notes)
        return None

    def exception_of(self, fault: Fault) -> Exception:
        """Return the exception to raise for what a worker has sent."""
        known: dict[str, type[Exception]] = {kind.__name__: kind for kind in (*self.others, MessageInvalid)}
        error = known.get(fault.name, self.base)(fault.text)
        for note in fault.notes:
            error.add_note(note)
        return error
