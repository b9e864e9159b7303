"""`kybernate ps` and `kybernate status`: what the containers of this node's Kybernate shims are doing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from kybernate.cli.moved import arena_document
from kybernate.cli.options import ADDRESS, Address, Json, Namespace
from kybernate.cli.output import printable, seconds, show_columns, show_fields, show_json, size
from kybernate.node.containerd import Containerd
from kybernate.node.failure import Failure
from kybernate.node.lookup import Container
from kybernate.node.shim import shim_of
from kybernate.node.survey import Seen, survey
from kybernate_shim.messages import shim_pb2 as wire

ID_WIDTH = 13  # as `crictl ps` shows ids
HEADER = ("CONTAINER", "NAME", "STATE", "PHASE", "STEP", "DONE", "PID", "NAMESPACE")
UNKNOWN = "unknown"  # of a container whose shim does not answer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(ps)
    app.command()(status)


def ps(namespace: Namespace = "", address: Address = ADDRESS, as_json: Json = False) -> None:
    """List the containers of Kybernate's shims."""
    with Containerd(address) as containerd:
        seen = asyncio.run(survey(containerd.containers(namespace), containerd.address))
    if as_json:
        show_json([_document(one) for one in seen])
        return
    show_columns(HEADER, [_row(one) for one in seen])
    for one in seen:
        for words in [one.problem] if one.problem else _notes(one.status or wire.Container()):
            typer.echo(f"kybernate: {printable(f'{one.container.title}: {words}')}", err=True)


def status(
    container: Annotated[
        str,
        typer.Argument(
            metavar="CONTAINER",
            help="Id of a container or its beginning, or [NAMESPACE/]POD[/CONTAINER]; without it, as `ps`.",
            show_default=False,
        ),
    ] = "",
    namespace: Namespace = "",
    address: Address = ADDRESS,
    as_json: Json = False,
) -> None:
    """Say what a container is doing.

    Its state, and how far a checkpoint, restore, suspend or resume has come.
    """
    if not container:
        ps(namespace, address, as_json)
        return
    with Containerd(address) as containerd:
        found = containerd.find(container, namespace)
    seen = asyncio.run(_one(found, containerd.address))
    if as_json:
        show_json(_document(seen))
    else:
        _show(seen)


async def _one(container: Container, address: str) -> Seen:
    async with shim_of(container, address) as shim:
        found = await shim.status(container.id, gpu=True)
    if not found:
        raise Failure(f"the shim of {container.title} does not know it")
    return Seen(container, found[0])


def _state(status: wire.Container | None) -> str:
    if status is None:
        return UNKNOWN
    gpu = status.gpu or ("suspended" if status.suspended else "")
    return f"{status.state}, {gpu}" if gpu not in ("", "attached", f"{status.phase}ing") else status.state


def _notes(status: wire.Container) -> list[str]:
    """Say what is odd about its GPU state, and why it is not in the arena that it asked for."""
    return [*filter(None, [status.note]), *(f"arena: {reason}" for reason in status.arena.reasons)]


def _done(status: wire.Container) -> str:
    if not status.total_bytes:
        return size(status.done_bytes) if status.done_bytes else ""
    return f"{size(status.done_bytes)} of {size(status.total_bytes)}"


def _row(seen: Seen) -> tuple[object, ...]:
    container, status = seen.container, seen.status or wire.Container()
    return (
        container.id[:ID_WIDTH] if container.pod else container.id,
        container.title,
        _state(seen.status),
        status.phase,
        status.step,
        _done(status),
        status.pid or container.pid or "",
        container.namespace,
    )


def _show(seen: Seen) -> None:
    container, status = seen.container, seen.status or wire.Container()
    show_fields(
        {
            "container": container.id,
            "name": container.title if container.pod else "",
            "namespace": container.namespace,
            "image": container.image,
            "runtime": container.runtime,
            "state": _state(seen.status),
            "pid": status.pid or "",
            "CUDA processes": ", ".join(_processes(status)),
            "phase": status.phase,
            "step": status.step,
            "done": _done(status),
            "for": seconds(status.seconds) if status.phase else "",
            "note": "; ".join(_notes(status)),
        }
    )


def _processes(status: wire.Container) -> list[str]:
    states = {one.pid: f" {one.state}" for one in status.cuda}
    return [f"{pid}{states.get(pid, '')}" for pid in status.cuda_pids]


def _document(seen: Seen) -> dict[str, Any]:
    container, status = seen.container, seen.status or wire.Container()
    return {
        "namespace": container.namespace,
        "container": container.id,
        "pod_namespace": container.pod_namespace,
        "pod": container.pod,
        "name": container.name,
        "image": container.image,
        "runtime": container.runtime,
        "state": status.state or UNKNOWN,
        "suspended": status.suspended,
        "pid": status.pid,
        "gpu": status.gpu,
        "cuda_pids": list(status.cuda_pids),
        "cuda": [{"pid": one.pid, "state": one.state} for one in status.cuda],
        "arena": arena_document(status.arena) if status.HasField("arena") else None,
        "note": status.note,
        "phase": status.phase,
        "step": status.step,
        "done_bytes": status.done_bytes,
        "total_bytes": status.total_bytes,
        "seconds": status.seconds,
        "problem": seen.problem,
    }
