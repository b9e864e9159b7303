"""`kybernate checkpoint`: write a running container to a checkpoint image."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.agents import agent_or_none, finished, require_wait
from kybernate.cli.directly import carried_out
from kybernate.cli.ended import checkpointed
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import as_documents
from kybernate.cli.options import ADDRESS, Address, ContainerName, Namespace, Wait
from kybernate.cli.output import seconds, show_columns, show_fields, size
from kybernate.cli.through_agent import begun
from kybernate.node.lookup import KnownContainer
from kybernate.verbs.checkpoint import Checkpoint
from kybernate_shim.messages.shim_pb2 import CheckpointResponse


class Tcp(StrEnum):
    """What happens to established connections."""

    CLOSE = "close"
    ESTABLISHED = "established"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(checkpoint)


def checkpoint(
    container: ContainerName,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Name of the new image, for a pod's container in the directory of its namespace; or a directory.",
            show_default="NAME-TIME",
        ),
    ] = "",
    exit: Annotated[bool, typer.Option("--exit", help="End the container when its image is complete.")] = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Leave it frozen when its image is complete, until it is ended or released.")
    ] = False,
    hold_for: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Like --hold, but the container continues by itself after this time.",
            show_default="as configured",
        ),
    ] = 0,
    tcp: Annotated[
        Tcp | None,
        typer.Option(
            metavar="close|established", help="What happens to established connections.", show_default="as configured"
        ),
    ] = None,
    rootfs: Annotated[
        bool, typer.Option("--rootfs/--no-rootfs", help="Include the files that the container changed.")
    ] = True,
    volumes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Volumes of the pod to include: names, names with a hyphen to exclude, all, or none.",
            show_default="as the pod's annotation",
        ),
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time limit for all steps together.", show_default="as configured"),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Continue if only a risk was found.")] = False,
    max_freeze: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Longest time to keep it frozen, such as 2s or 500ms, or none.",
            show_default="as configured for its pod or the node",
        ),
    ] = "",
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Write a container to a checkpoint image.

    The container is frozen while its memory is written, and then keeps running. --exit ends it instead. --hold leaves
    it frozen until its pod ends, `kybernate release` is called, or the deadline passes. When a step fails, the
    container continues as before. A pod with one container may be named instead of the container.
    """
    hold = hold or bool(hold_for)
    if hold and (exit or tcp is Tcp.ESTABLISHED):
        raise typer.BadParameter("--hold excludes --exit and --tcp established")
    limit = _seconds(max_freeze)
    with agent_or_none(address) as agent:
        if agent is not None:
            operation = agent.checkpoint(
                container,
                str(Path(path).absolute()) if "/" in path else path,
                namespace=namespace,
                exit=exit,
                hold=hold,
                hold_timeout=hold_for,
                tcp=tcp or "",
                rootfs=rootfs,
                volumes=volumes,
                force=force,
                max_freeze=limit,
                deadline=timeout,
            )
            if not wait:
                return begun(operation)
            return _print(*checkpointed(finished(operation)), held=hold, output=output)
    require_wait(wait)
    verb = Checkpoint(
        container,
        namespace,
        str(Path(path).absolute()) if "/" in path else path,
        exit=exit,
        hold=hold,
        hold_timeout=hold_for,
        tcp=tcp or "",
        without_rootfs=not rootfs,
        volumes=volumes,
        force=force,
        max_freeze=limit,
    )
    return _print(*checkpointed(carried_out(verb, address, seconds=timeout)), held=hold, output=output)


def _seconds(max_freeze: str) -> float:
    from kybernate_shim.checkpoint.freeze_limit import seconds_of  # few checkpoints have a limit of their own

    try:
        return seconds_of(max_freeze) if max_freeze else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-freeze") from error


def _print(container: KnownContainer, reply: CheckpointResponse, *, held: bool, output: Format) -> None:
    if not show_document(_document(container, reply), output, reply.path):
        _show(container, reply)
        if held:
            typer.echo(f"\n{container.title} is held: `kybernate ps` shows it, `kybernate release` lets it continue")


def _show(container: KnownContainer, reply: CheckpointResponse) -> None:
    show_fields(
        {
            "image": reply.path,
            "container": container.title,
            "size": size(reply.bytes),
            "frozen": seconds(reply.frozen_ms / 1000),
            "time": seconds(reply.seconds),
        }
    )
    rows = [(step.name, seconds(step.seconds), size(step.bytes) if step.bytes else "") for step in reply.steps]
    if rows:
        typer.echo()
        show_columns(("STEP", "TIME", "SIZE"), rows)


def _document(container: KnownContainer, reply: CheckpointResponse) -> dict[str, Any]:
    return {
        "path": reply.path,
        "namespace": container.namespace,
        "container": container.id,
        "manifest_digest": reply.manifest_digest,
        "bytes": reply.bytes,
        "frozen_ms": reply.frozen_ms,
        "seconds": reply.seconds,
        "steps": as_documents(reply.steps),
    }
