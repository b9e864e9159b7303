"""The RPC code of each error of the inner modules, as one table: the code shows what a client can do about it.

Source: gRPC's "Status codes and their use in gRPC"; for an operation that runs already, the Container Storage
Interface, which answers ABORTED to a second one. UNAVAILABLE is not used: to containerd it means that the shim is gone.
Older containerd passes some of the codes on as UNKNOWN, always with the message.
"""

from __future__ import annotations

from dataclasses import dataclass

from kybernate_shim.config import ConfigInvalid
from kybernate_shim.errors import Aborted, Busy, Cancelled, Damaged, Failed, Invalid, Missing, NoRoom, Refused, Taken
from kybernate_shim.oci.runtime import RuntimeFailed, RuntimeTimedOut
from kybernate_shim.task.lifecycle import InvalidMove
from kybernate_shim.ttrpc import Code, RpcError
from kybernate_shim.undo import in_words


@dataclass(frozen=True)
class CodeRule:
    """Kinds of errors, their code, and what is true after a call with that answer."""

    kinds: tuple[type[Exception], ...]
    code: Code
    meaning: str


# The first rule that matches an error wins.
RULES = (
    CodeRule((Missing,), Code.NOT_FOUND, "what was named does not exist"),
    CodeRule((Taken,), Code.ALREADY_EXISTS, "the id is in use"),
    CodeRule(
        (Refused,),
        Code.FAILED_PRECONDITION,
        "it cannot be done in the current state; nothing was changed, or all of it was undone. A retry needs the"
        " change that the message names",
    ),
    CodeRule(
        (Invalid, ConfigInvalid),
        Code.INVALID_ARGUMENT,
        "the request, the container's configuration or the node's is wrong",
    ),
    CodeRule((Damaged,), Code.DATA_LOSS, "bytes were changed or lost"),
    CodeRule((NoRoom,), Code.RESOURCE_EXHAUSTED, "there is not enough room for it; nothing was changed"),
    CodeRule(
        (Busy, Aborted),
        Code.ABORTED,
        "another operation on the container is in progress, or a kill has ended this one; nothing was changed, or"
        " all of it was undone. The call can be repeated when the other one has ended",
    ),
    CodeRule(
        (Cancelled,),
        Code.CANCELED,
        "a client cancelled the operation; all of it was undone, and the message says how the container is now",
    ),
    CodeRule(
        (RuntimeTimedOut, TimeoutError),
        Code.DEADLINE_EXCEEDED,
        "it took longer than its deadline, and was ended",
    ),
    CodeRule(
        (Failed,),
        Code.INTERNAL,
        "a step failed: CRIU, the OCI runtime or the driver. The message names it and the state of the container",
    ),
    CodeRule(
        (RuntimeFailed,),
        Code.UNKNOWN,
        "the OCI runtime refused or failed, as for a program that the container does not have; the message is its own."
        " containerd's own shim answers with this code, and clients know it",
    ),
)
KINDS = tuple(kind for rule in RULES for kind in rule.kinds)
PHRASES = {
    Code.NOT_FOUND: "not found",
    Code.ALREADY_EXISTS: "already exists",
    Code.FAILED_PRECONDITION: "failed precondition",
    Code.INVALID_ARGUMENT: "invalid argument",
    Code.DEADLINE_EXCEEDED: "deadline exceeded",
}  # Go clients cut these off and wrap the error again


def code_of(error: Exception) -> Code:
    """Return the code of an error of one of KINDS."""
    return next(rule.code for rule in RULES if isinstance(error, rule.kinds))


def rpc_error(error: Exception) -> RpcError:
    """Return the answer to a call that has raised `error`; UNKNOWN for an error of none of KINDS."""
    if isinstance(error, RpcError):
        return RpcError(error.code, error.message)
    code = code_of(error) if isinstance(error, KINDS) else Code.UNKNOWN
    phrase = PHRASES.get(code, "")
    return RpcError(code, f"{in_words(error)}: {phrase}" if phrase else in_words(error))


def task_error(error: Exception) -> RpcError:
    """Return the answer of containerd's Task service: a call that the state forbids has no code there.

    containerd's own shim has none for it, and clients rely on its codes.
    """
    return RpcError(Code.UNKNOWN, in_words(error)) if isinstance(error, InvalidMove) else rpc_error(error)


def markdown_table() -> str:
    """Return the table for the documentation."""
    lines = ["| code | errors | meaning |", "|---|---|---|"]
    for rule in RULES:
        names = ", ".join(f"`{kind.__name__}`" for kind in rule.kinds)
        lines.append(f"| `{rule.code.name}` | {names} | {rule.meaning} |")
    return "\n".join(lines) + "\n"
