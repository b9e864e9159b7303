"""`kybernate wake`, `sleep` and `park`: a container that is active, that uses no GPU, or has its VRAM on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.agents import agent_or_none, finished, is_remote, require_wait
from kybernate.cli.directly import carried_out
from kybernate.cli.formats import Format, Output, document_of, show_document
from kybernate.cli.options import ADDRESS, Address, ContainerName, Namespace, Wait
from kybernate.cli.output import size
from kybernate.cli.through_agent import begun
from kybernate.client import Agent, Operation
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Missing
from kybernate.verbs.park import Park
from kybernate.verbs.verb import Verb
from kybernate.verbs.wake import Sleep, Wake

RoomTimeout = Annotated[
    float, typer.Option("--room-timeout", min=0, metavar="SECONDS", help="How long it waits for room on the GPUs.")
]


Deadline = Annotated[
    float, typer.Option("--deadline", min=0, metavar="SECONDS", help="Give up after this time; needs the agent.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(wake)
    app.command()(sleep)
    app.command()(park)


def wake(
    container: ContainerName,
    room_timeout: RoomTimeout = 0,
    deadline: Deadline = 0,
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Make a container active: resume it if it is suspended, restore it if it is parked.

    An active container stays as it is. One with a seat waits for its turn. A model of `kybernate up` is named as in its
    file; others make room for it.
    """
    if not namespace and wait and (project := _project_of(container)):
        return _of_model(project, "wake", container, "active", output)

    def begin(agent: Agent) -> Operation:
        return agent.wake(container, namespace=namespace, room_timeout=room_timeout, deadline=deadline)

    return _carry_out(begin, Wake(container, namespace, room_timeout), "active", address, wait=wait, output=output)


def sleep(
    container: ContainerName,
    disk: Annotated[
        bool, typer.Option("--disk", help="Of a model of `kybernate up`: end its program, its template stays on disk.")
    ] = False,
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Free the GPUs of a container: suspend it, unless it is suspended or parked already.

    A model of `kybernate up` is named as in its file.
    """
    if not namespace and wait and (project := _project_of(container)):
        return _of_model(project, "sleep", container, "on disk" if disk else "asleep", output, disk=disk)
    if disk:
        raise Missing(f"no model of `kybernate up` is called {container}", advice="kybernate models")

    def begin(agent: Agent) -> Operation:
        return agent.sleep(container, namespace=namespace)

    return _carry_out(begin, Sleep(container, namespace), "asleep", address, wait=wait, output=output)


def park(
    container: ContainerName,
    deadline: Deadline = 0,
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Move the VRAM of a suspended container from host memory to the disk.

    Its processes stay, and `kybernate wake` brings all of it back.
    """

    def begin(agent: Agent) -> Operation:
        return agent.park(container, namespace=namespace, deadline=deadline)

    return _carry_out(begin, Park(container, namespace), "parked", address, wait=wait, output=output)


def _project_of(name: str) -> str:
    """Return the project of the model that a name means, "" where it means a container."""
    if is_remote() or not any(Path("/run/kybernate/up").glob("*.sock")):
        return ""
    from kybernate.up.control import project_of  # most nodes have no models of a file

    return project_of(name)


def _of_model(project: str, do: str, model: str, then: str, output: Format, **asked: bool) -> None:
    from kybernate.up.control import call

    name = call(project, do, model=model, **asked)
    if not show_document({"project": project, "model": name, "state": then}, output, name):
        typer.echo(f"{name} is {then}")


def _carry_out(
    begin: Callable[[Agent], Operation], verb: Verb, then: str, address: str, *, wait: bool, output: Format
) -> None:
    """Have the agent do it, or do it here where none runs, and print in which state the container is `then`."""
    with agent_or_none(address) as agent:
        if agent is not None:
            operation = begin(agent)
            return _print(finished(operation), then, output=output) if wait else begun(operation)
    require_wait(wait)
    return _print(carried_out(verb, address), then, output=output)


def _print(done: wire.Operation, then: str, *, output: Format) -> None:
    if show_document(document_of(done), output, done.container):
        return
    moved = f": {size(done.result.vram_bytes)} of VRAM" if done.result.vram_bytes else ""
    typer.echo(f"{done.container_title or done.container} is {then}{moved}")
