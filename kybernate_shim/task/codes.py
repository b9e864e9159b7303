"""Which RPC code each error of the inner modules gets, as one table: the code says what a client can do about it.

Source: gRPC's "Status codes and their use in gRPC"; for an operation that is under way already, the Container Storage
Interface, which answers ABORTED to a second one. UNAVAILABLE is not used: to containerd it means that the shim is gone.
Older containerd passes some of the codes on as UNKNOWN, always with the message.
"""

from __future__ import annotations

from dataclasses import dataclass

from kybernate_shim.config import ConfigInvalid
from kybernate_shim.errors import Aborted, Busy, Damaged, Failed, Missing, NoRoom, Refused
from kybernate_shim.oci.options import UnsupportedOptions
from kybernate_shim.oci.runtime import ProcessGone, RuntimeFailed, RuntimeTimedOut
from kybernate_shim.oci.select import RuntimeMissing
from kybernate_shim.oci.spec import SpecInvalid
from kybernate_shim.task.container import ExecExists, ExecNotFound, InitGone, NotStarted
from kybernate_shim.task.destination import MalformedUri, UnsupportedScheme
from kybernate_shim.task.lifecycle import InvalidMove
from kybernate_shim.ttrpc import Code


@dataclass(frozen=True)
class Rule:
    """Errors of some kinds, their code, and what is true after a call that was answered so."""

    kinds: tuple[type[Exception], ...]
    code: Code
    meaning: str


# The first rule that matches an error counts.
RULES = (
    Rule((ProcessGone, ExecNotFound, RuntimeMissing, Missing), Code.NOT_FOUND, "what was named is not there"),
    Rule((ExecExists,), Code.ALREADY_EXISTS, "the id is taken"),
    Rule(
        (InitGone, NotStarted, InvalidMove, Refused),
        Code.FAILED_PRECONDITION,
        "it cannot be done as things are; nothing was changed, or all of it was undone. Repeating it is of no use"
        " before something else is done, which the message names",
    ),
    Rule(
        (UnsupportedOptions, ConfigInvalid, SpecInvalid, MalformedUri, UnsupportedScheme),
        Code.INVALID_ARGUMENT,
        "the request, the container's configuration or the node's is wrong",
    ),
    Rule((Damaged,), Code.DATA_LOSS, "bytes are not what they were"),
    Rule((NoRoom,), Code.RESOURCE_EXHAUSTED, "there is not enough room for it; nothing was changed"),
    Rule(
        (Busy, Aborted),
        Code.ABORTED,
        "another operation on the container is under way, or a kill has ended this one; nothing was changed, or all of"
        " it was undone. The call can be repeated when the other one has ended",
    ),
    Rule(
        (RuntimeTimedOut, TimeoutError),
        Code.DEADLINE_EXCEEDED,
        "it took longer than its deadline, and was ended",
    ),
    Rule(
        (Failed, RuntimeFailed),
        Code.INTERNAL,
        "a step failed: CRIU, the OCI runtime or the driver. The message says which, and how the container is now",
    ),
)
KINDS = tuple(kind for rule in RULES for kind in rule.kinds)


def code_of(error: Exception) -> Code:
    """Return the code of an error of one of KINDS."""
    return next(rule.code for rule in RULES if isinstance(error, rule.kinds))


def markdown_table() -> str:
    """Return the table for the documentation."""
    lines = ["| code | errors | meaning |", "|---|---|---|"]
    for rule in RULES:
        names = ", ".join(f"`{kind.__name__}`" for kind in rule.kinds)
        lines.append(f"| `{rule.code.name}` | {names} | {rule.meaning} |")
    return "\n".join(lines) + "\n"
