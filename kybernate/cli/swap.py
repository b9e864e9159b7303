"""`kybernate swap`: suspends one container and resumes another on the same GPUs, concurrently."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from kybernate.cli.agents import agent_or_none, finished, seconds_of
from kybernate.cli.formats import document_of
from kybernate.cli.moved import arena_document, arena_lines, as_documents, vram
from kybernate.cli.options import ADDRESS, Address, Json, Namespace
from kybernate.cli.output import printable, seconds, show_columns, show_json, size
from kybernate.cli.reporting import Interrupted
from kybernate.messages import agent_pb2 as wire
from kybernate.node.containerd import Containerd
from kybernate.node.swap import Swapped, swap
from kybernate_shim.messages.shim_pb2 import ResumeResponse, SuspendResponse

Leaving = Annotated[str, typer.Argument(metavar="OUT", help="The container that is suspended.")]
Coming = Annotated[str, typer.Argument(metavar="IN", help="The container that is resumed in its place.")]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0.1, metavar="SECONDS", help="How long IN waits for the memory that OUT releases."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="swap")(run)


def run(
    leaving: Leaving,
    coming: Coming,
    wait: Wait = 10,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    as_json: Json = False,
) -> None:
    """Suspend OUT and resume IN on the same GPUs, in parallel.

    When IN cannot be resumed, OUT is resumed; when OUT cannot be suspended, IN stays suspended.
    """
    with agent_or_none(address) as agent:
        if agent is not None:
            operation = agent.swap(leaving, coming, namespace=namespace, room_timeout=wait)
            return _show_ended(finished(operation), as_json=as_json)
    with Containerd(address) as containerd:
        out, back = containerd.find(leaving, namespace), containerd.find(coming, namespace)
    try:
        done = asyncio.run(swap(out, back, containerd.address, wait))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted", state="both shims continue", advice=f"see `kybernate status {out.id}` and `{back.id}`"
        ) from None
    return _show(done, out.title, back.title, as_json=as_json)


def _show_ended(done: wire.Operation, *, as_json: bool) -> None:
    """Print a swap that the agent carried out, which is one operation with the steps of both sides."""
    if as_json:
        show_json(document_of(done))
        return
    typer.echo(f"suspended {done.container_title or done.container}")
    typer.echo(f"resumed {done.other_container}: {size(done.result.vram_bytes)} of VRAM")
    for reason in done.result.arena_reasons:
        typer.echo(f"arena: {printable(reason)}")
    rows = [(step.name, seconds(step.seconds)) for step in done.steps]
    show_columns(("STEP", "TIME"), [*rows, ("together", seconds(seconds_of(done)))])


def _show(done: Swapped, out: str, back: str, *, as_json: bool) -> None:
    replies: dict[str, tuple[str, SuspendResponse | ResumeResponse]] = {
        "suspended": (out, done.left),
        "resumed": (back, done.came),
    }
    if as_json:
        document = {
            verb: {
                "container": title,
                "vram_bytes": reply.vram_bytes,
                "steps": as_documents(reply.steps),
            }
            for verb, (title, reply) in replies.items()
        }
        document["suspended"]["arena"] = arena_document(done.left.arena)
        show_json({**document, "seconds": done.seconds})
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
