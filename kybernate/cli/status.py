"""`kybernate ps` and `kybernate status`: what the containers of this node's Kybernate shims are doing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kybernate.cli.agents import NO_AGENT_ADVICE, agent_or_none, is_remote
from kybernate.cli.declared import Argument, Option
from kybernate.cli.formats import NONE, Format, Output, Table, show_document, until_interrupted
from kybernate.cli.moved import arena_document
from kybernate.cli.options import ADDRESS, Address, Namespace
from kybernate.cli.output import echo, printable, seconds, show_fields, size
from kybernate.node.failure import Failure, Unavailable

# One of two ways is taken: by the agent, or by containerd and the shims. The commands load what it needs, no more.
if TYPE_CHECKING:
    from typer import Typer

    from kybernate.client import Agent
    from kybernate.node.lookup import KnownContainer
    from kybernate.node.survey import SurveyedContainer
    from kybernate_shim.messages import shim_pb2 as wire

ID_WIDTH = 13  # as `crictl ps` shows ids
HEADER = ("CONTAINER", "NAME", "STATE", "PHASE", "STEP", "DONE", "PID", "NAMESPACE", "IMAGE", "RUNTIME", "NOTE")
NARROW = 8
UNKNOWN = "unknown"  # of a container whose shim does not answer


def register(app: Typer) -> None:
    """Add the commands."""
    app.command()(ps)
    app.command()(status)


def ps(
    namespace: Namespace = "",
    watch: Annotated[bool, Option(("--watch", "-w"), "Continue with a line for each change; needs the agent.")] = False,
    output: Output = Format.TABLE,
    address: Address = ADDRESS,
) -> None:
    """List the containers of Kybernate's shims."""
    with agent_or_none(address) as agent:
        if agent is not None:
            from kybernate.cli.surveying import surveyed

            _list(surveyed(agent, namespace), output)
            if watch:
                _watch(agent, namespace, output)
            return
    if watch:
        raise Unavailable("--watch needs an agent, and none runs on this node", advice=NO_AGENT_ADVICE)
    import asyncio

    from kybernate.node.containerd import Containerd

    with Containerd(address) as containerd:
        from kybernate.node.survey import survey

        _list(asyncio.run(survey(containerd.containers(namespace), containerd.address)), output)


def _watch(agent: Agent, namespace: str, format: Format) -> None:
    """Print a line for each container that changes from now on."""
    from kybernate.cli.surveying import changes

    with until_interrupted():
        for one in changes(agent, namespace):
            TABLE.show_change(format, one)


def _list(seen: Sequence[SurveyedContainer], format: Format) -> None:
    TABLE.show(format, seen)
    if format.is_document:
        return
    for one in seen:
        for words in [one.problem] if one.problem else _notes(one.status):
            echo(f"kybernate: {printable(f'{one.container.title}: {words}')}", err=True)


def status(
    container: Annotated[
        str,
        Argument(
            "CONTAINER",
            "Id of a container or its beginning, or [NAMESPACE/]POD[/CONTAINER]; without it, as `ps`.",
            "a_container",
        ),
    ] = "",
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Show what a container is doing.

    Its state, and how far a checkpoint, restore, suspend or resume has come.
    """
    if not container:
        ps(namespace, output=output, address=address)
        return
    if is_remote() or os.geteuid() != 0:  # the socket of a shim is for root of its node
        with agent_or_none(address) as agent:
            if agent is not None:
                from kybernate.cli.surveying import surveyed_one

                known = surveyed_one(agent, container, namespace)
                if not show_document(_document(known), output, known.container.id):
                    _show(known)
                return
    import asyncio

    from kybernate.node.containerd import Containerd

    with Containerd(address) as containerd:
        found = containerd.find(container, namespace)
    seen = asyncio.run(_one(found, containerd.address))
    if not show_document(_document(seen), output, found.id):
        _show(seen)


async def _one(container: KnownContainer, address: str) -> SurveyedContainer:
    from kybernate.node.shim import shim_of
    from kybernate.node.survey import SurveyedContainer

    async with shim_of(container, address) as shim:
        found = await shim.status(container.id, gpu=True)
    if not found:
        raise Failure(f"container {container.title} is unknown to its shim")
    return SurveyedContainer(container, found[0])


def _known(seen: SurveyedContainer) -> wire.Container:
    """Return what its shim has said, nothing where it has not answered."""
    from kybernate_shim.messages import shim_pb2 as wire

    return seen.status or wire.Container()


def _state(status: wire.Container | None) -> str:
    if status is None:
        return UNKNOWN
    from kybernate.node.lookup import shown_gpu

    gpu = shown_gpu(status.gpu, status.parked_bytes) or ("suspended" if status.suspended else "")
    return f"{status.state}, {gpu}" if gpu not in ("", "attached", f"{status.phase}ing") else status.state


def _notes(status: wire.Container | None) -> list[str]:
    """Say what is odd about its GPU state, and why it is not in the arena that it asked for."""
    if status is None:
        return []
    return [*filter(None, [status.note]), *(f"arena: {reason}" for reason in status.arena.reasons)]


def _done(status: wire.Container) -> str:
    if not status.total_bytes:
        return size(status.done_bytes) if status.done_bytes else ""
    return f"{size(status.done_bytes)} of {size(status.total_bytes)}"


def _row(seen: SurveyedContainer) -> tuple[object, ...]:
    container, status = seen.container, _known(seen)
    return (
        container.id[:ID_WIDTH] if container.pod else container.id,
        container.title,
        _state(seen.status),
        status.phase,
        status.step,
        _done(status),
        status.pid or container.pid or "",
        container.namespace,
        container.image or NONE,
        container.runtime or NONE,
        seen.problem or "; ".join(_notes(status)) or NONE,
    )


def _show(seen: SurveyedContainer) -> None:
    container, status = seen.container, _known(seen)
    show_fields(
        {
            "container": container.id,
            "name": container.title if container.pod else "",
            "namespace": container.namespace,
            "image": container.image,
            "runtime": container.runtime,
            "state": _state(seen.status),
            "held": f"for {seconds(status.held_seconds)} at most" if status.held_seconds else "",
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


def _document(seen: SurveyedContainer) -> dict[str, Any]:
    container, status = seen.container, _known(seen)
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
        "held_seconds": status.held_seconds,
        "pid": status.pid,
        "gpu": status.gpu,
        "parked_bytes": status.parked_bytes,
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


TABLE = Table(HEADER, _row, _document, NARROW, lambda seen: seen.container.id)
