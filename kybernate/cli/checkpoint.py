"""`kybernate checkpoint`: write a running container to a checkpoint image."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.agents import agent_or_none, require_wait
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import as_documents
from kybernate.cli.options import ADDRESS, Address, ContainerName, Namespace, Wait
from kybernate.cli.output import seconds, show_columns, show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.cli.through_agent import begun, checkpointed
from kybernate.node.containerd import Containerd
from kybernate.node.lookup import KnownContainer
from kybernate.node.places import new_place
from kybernate.node.restore import image_digest
from kybernate.node.shim import ShimRefused, shim_of, state_now, watching
from kybernate_shim.messages.shim_pb2 import CheckpointRequest, CheckpointResponse


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
            help="As --hold, but it continues by itself after that time.",
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
        typer.Option(min=0, metavar="SECONDS", help="For all steps together.", show_default="as configured"),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Continue where only a risk was found.")] = False,
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
            return _print(*checkpointed(operation), held=hold, output=output)
    require_wait(wait)
    with Containerd(address) as containerd:
        found = containerd.find(container, namespace)
        digest = image_digest(containerd, found.namespace, found.image)
    request = CheckpointRequest(
        id=found.id,
        path=str(new_place(found, path)),
        exit=exit,
        hold=hold,
        hold_seconds=hold_for,
        tcp=tcp or "",
        rootfs_diff=rootfs,
        volumes=volumes,
        timeout_seconds=timeout,
        force=force,
        image=found.image,
        image_digest=digest,
        max_freeze_seconds=limit,
    )
    return _print(found, _run(found, containerd.address, request), held=hold, output=output)


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


def _run(container: KnownContainer, address: str, request: CheckpointRequest) -> CheckpointResponse:
    try:
        with Bar(f"checkpoint {container.title}") as bar:
            return asyncio.run(_checkpoint(container, address, request, bar))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted",
            state=f"the shim continues the checkpoint into {request.path}",
            advice=f"see `kybernate status {container.id}`",
        ) from None


async def _checkpoint(
    container: KnownContainer, address: str, request: CheckpointRequest, bar: Bar
) -> CheckpointResponse:
    try:
        async with shim_of(container, address) as shim, watching(shim, container.id, bar.show):
            return await shim.checkpoint(request)
    except ShimRefused as error:
        error.args = (f"cannot checkpoint {container.title}: {error}",)
        error.state = await state_now(container, address)
        raise


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
