"""`kybernate swap`: suspends one container and resumes another on the same GPUs, concurrently."""

from __future__ import annotations

from typing import Annotated

import typer

from kybernate.cli.agents import agent_or_none, finished, require_wait, seconds_of
from kybernate.cli.completion import a_container
from kybernate.cli.directly import carried_out
from kybernate.cli.ended import arena_of, steps_of
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import arena_document, arena_lines, as_documents, vram
from kybernate.cli.options import ADDRESS, Address, Namespace, Wait
from kybernate.cli.output import seconds, show_columns
from kybernate.cli.through_agent import begun
from kybernate.messages import agent_pb2 as wire
from kybernate.verbs.swap import Swap

Leaving = Annotated[
    str, typer.Argument(metavar="OUT", help="The container that is suspended.", autocompletion=a_container)
]
Coming = Annotated[
    str, typer.Argument(metavar="IN", help="The container that is resumed in its place.", autocompletion=a_container)
]
RoomTimeout = Annotated[
    float,
    typer.Option("--room-timeout", min=0.1, metavar="SECONDS", help="How long IN may wait for the VRAM of OUT."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="swap")(run)


def run(
    leaving: Leaving,
    coming: Coming,
    room_timeout: RoomTimeout = 10,
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Suspend OUT and resume IN on the same GPUs, in parallel.

    When IN cannot be resumed, OUT is resumed; when OUT cannot be suspended, IN stays suspended.
    """
    with agent_or_none(address) as agent:
        if agent is not None:
            operation = agent.swap(leaving, coming, namespace=namespace, room_timeout=room_timeout)
            return _print(finished(operation), output=output) if wait else begun(operation)
    require_wait(wait)
    return _print(carried_out(Swap(leaving, coming, namespace, room_timeout), address), output=output)


def _print(done: wire.Operation, *, output: Format) -> None:
    """Print a swap, which has the steps of both sides. What moved through the arena is of the container that left."""
    result, arena = done.result, arena_of(done)
    document = {
        "suspended": done.container,
        "resumed": done.other_container,
        "vram_bytes": result.vram_bytes,
        "arena": arena_document(arena),
        "seconds": seconds_of(done),
        "steps": as_documents(steps_of(done)),
    }
    if show_document(document, output, done.other_container):
        return
    spared = sum(step.spared_bytes for step in done.steps) - result.left_spared_bytes
    left = f": {vram(result.left_vram_bytes, result.left_spared_bytes)}" if result.left_vram_bytes else ""
    typer.echo(f"suspended {done.container_title or done.container}{left}")
    typer.echo(f"resumed {done.other_container_title or done.other_container}: {vram(result.vram_bytes, spared)}")
    for line in arena_lines(arena, result.left_vram_bytes):
        typer.echo(line)
    rows = [(step.name, seconds(step.seconds)) for step in done.steps]
    show_columns(("STEP", "TIME"), [*rows, ("together", seconds(seconds_of(done)))])
