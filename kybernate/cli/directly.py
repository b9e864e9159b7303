"""Carries a verb out in the command's own process, where no agent runs, with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.verbs import here
from kybernate.verbs.wire import operation_message

if TYPE_CHECKING:
    from kybernate.messages import agent_pb2 as wire
    from kybernate.verbs.attempt import Streams
    from kybernate.verbs.model import Target
    from kybernate.verbs.verb import Verb


def carried_out(verb: Verb, address: str, *, seconds: float = 0, streams: Streams | None = None) -> wire.Operation:
    """Carry a verb out over the containerd at `address`, and return the operation as an agent would.

    `seconds` limits a checkpoint, 0: as configured; `streams` are those of a container that is restored, None: into its
    log. Raises Failure, and Interrupted after Ctrl-C.
    """
    asked = here.resolved(verb, address)
    try:
        with Bar(f"{verb.verb} {asked.target.title}") as bar:
            done = here.carried_out(asked, address, bar.report, seconds=seconds, streams=streams)
    except KeyboardInterrupt:
        raise _interrupted(verb.verb, asked.target) from None
    return operation_message(done)


def _interrupted(verb: str, target: Target) -> Interrupted:
    if verb == "restore":
        return Interrupted("interrupted", state=f"container {target.container} was removed again")
    into = f" into {target.writes}" if target.writes else ""
    shims = "both shims continue" if target.other else "the shim continues"
    commands = [f"`kybernate status {one}`" for one in (target.container, target.other) if one]
    return Interrupted("interrupted", state=f"{shims} the {verb}{into}", advice=f"see {' and '.join(commands)}")
