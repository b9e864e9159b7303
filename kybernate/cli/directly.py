"""Carries a verb out in the command's own process, where no agent runs, with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.verbs import here
from kybernate.verbs.wire import operation_message

if TYPE_CHECKING:
    from kybernate.messages import agent_pb2 as wire
    from kybernate.verbs.verb import Verb


def carried_out(verb: Verb, address: str, seconds: float = 0) -> wire.Operation:
    """Carry a verb out over the containerd at `address`, and return the operation as an agent would.

    `seconds` limits a checkpoint, 0: as configured. Raises Failure, and Interrupted after Ctrl-C: the shim continues.
    """
    asked = here.resolved(verb, address)
    target = asked.target
    try:
        with Bar(f"{verb.verb} {target.title}") as bar:
            done = here.carried_out(asked, address, bar.report, seconds)
    except KeyboardInterrupt:
        into = f" into {target.writes}" if target.writes else ""
        raise Interrupted(
            "interrupted",
            state=f"the shim continues the {verb.verb}{into}",
            advice=f"see `kybernate status {target.container}`",
        ) from None
    return operation_message(done)
