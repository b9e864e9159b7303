"""`kybernate swap`: suspends one container and resumes another on the same GPUs, concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kybernate.cli.agents import agent_or_none, finished, require_wait, seconds_of
from kybernate.cli.completion import a_container
from kybernate.cli.ended import steps_of
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import arena_document, arena_lines, as_documents, vram
from kybernate.cli.options import ADDRESS, Address, Namespace, Wait
from kybernate.cli.output import printable, seconds, show_columns, size
from kybernate.cli.reporting import Interrupted
from kybernate.cli.through_agent import begun
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import Containerd
from kybernate.node.lookup import KnownContainer
from kybernate.node.swap import Swapped, swap
from kybernate_shim.messages import shim_pb2 as wire_shim
from kybernate_shim.messages.shim_pb2 import ResumeResponse, SuspendResponse

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
            return _show_ended(finished(operation), output=output) if wait else begun(operation)
    require_wait(wait)
    with Containerd(address) as containerd:
        out, back = containerd.find(leaving, namespace), containerd.find(coming, namespace)
    try:
        done = asyncio.run(swap(out, back, containerd.address, room_timeout))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted", state="both shims continue", advice=f"see `kybernate status {out.id}` and `{back.id}`"
        ) from None
    return _show(done, out, back, output=output)


def _show_ended(done: wire.Operation, *, output: Format) -> None:
    """Print a swap that the agent carried out, which is one operation with the steps of both sides."""
    result = done.result
    arena = wire_shim.Arena(
        asked=bool(result.arena_bytes or result.arena_reasons), bytes=result.arena_bytes, reasons=result.arena_reasons
    )
    steps = steps_of(done)
    document = _document(done.container, done.other_container, result.vram_bytes, arena, seconds_of(done), steps)
    if show_document(document, output, done.other_container):
        return
    typer.echo(f"suspended {done.container_title or done.container}")
    typer.echo(f"resumed {done.other_container}: {size(done.result.vram_bytes)} of VRAM")
    for reason in done.result.arena_reasons:
        typer.echo(f"arena: {printable(reason)}")
    rows = [(step.name, seconds(step.seconds)) for step in done.steps]
    show_columns(("STEP", "TIME"), [*rows, ("together", seconds(seconds_of(done)))])


def _show(done: Swapped, out: KnownContainer, back: KnownContainer, *, output: Format) -> None:
    replies: dict[str, tuple[str, SuspendResponse | ResumeResponse]] = {
        "suspended": (out.title, done.left),
        "resumed": (back.title, done.came),
    }
    steps = [*done.left.steps, *done.came.steps]
    document = _document(out.id, back.id, done.came.vram_bytes, done.left.arena, done.seconds, steps)
    if show_document(document, output, back.id):
        return
    for verb, (title, reply) in replies.items():
        typer.echo(f"{verb} {title}: {vram(reply)}")
    for line in arena_lines(done.left):
        typer.echo(line)
    show_columns(
        ("STEP", "TIME"),
        [(step.name, seconds(step.seconds)) for _, reply in replies.values() for step in reply.steps]
        + [("together", seconds(done.seconds))],
    )


def _document(
    suspended: str, resumed: str, vram_bytes: int, arena: wire_shim.Arena, took: float, steps: Sequence[wire_shim.Step]
) -> dict[str, Any]:
    """Return a swap as a document. The VRAM is that of the container that was resumed, the arena that of the other."""
    return {
        "suspended": suspended,
        "resumed": resumed,
        "vram_bytes": vram_bytes,
        "arena": arena_document(arena),
        "seconds": took,
        "steps": as_documents(steps),
    }
