"""`kybernate suspend` and `resume`: VRAM into host memory and back, while the container stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kybernate.cli.agents import agent_or_none, finished, require_wait
from kybernate.cli.declared import Option
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import arena_document, arena_lines, as_documents, vram
from kybernate.cli.options import ADDRESS, Address, ContainerName, Namespace, Wait
from kybernate.cli.output import echo, seconds, show_columns

# One of two ways is taken: by the agent, or by containerd and the shim. The commands load what it needs, no more.
if TYPE_CHECKING:
    from typer import Typer

    from kybernate.node.lookup import KnownContainer
    from kybernate_shim.messages.shim_pb2 import ResumeResponse, SuspendResponse

    Reply = SuspendResponse | ResumeResponse

LockTimeout = Annotated[
    float,
    Option(
        ("--timeout",), "Time limit for the CUDA driver's lock.", metavar="SECONDS", least=0, default="as configured"
    ),
]
RestoreTimeout = Annotated[
    float,
    Option(
        ("--timeout",), "Time limit for the CUDA driver's restore.", metavar="SECONDS", least=0, default="as configured"
    ),
]
DONE = {"suspend": "suspended", "resume": "resumed"}


def register(app: Typer) -> None:
    """Add the commands."""
    app.command()(suspend)
    app.command()(resume)


def suspend(
    container: ContainerName,
    timeout: LockTimeout = 0,
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Offload a container's VRAM to host memory.

    Its processes wait for `resume`; its GPUs are free.
    """
    with agent_or_none(address) as agent:
        if agent is not None:
            from kybernate.cli.ended import suspended
            from kybernate.cli.through_agent import begun

            operation = agent.suspend(container, namespace=namespace, lock_timeout=timeout)
            return _print("suspend", *suspended(finished(operation)), output=output) if wait else begun(operation)
    require_wait(wait)
    from kybernate.cli.directly import carried_out
    from kybernate.cli.ended import suspended
    from kybernate.verbs.suspend import Suspend

    done = carried_out(Suspend(container, namespace, timeout), address)
    return _print("suspend", *suspended(done), output=output)


def resume(
    container: ContainerName,
    timeout: RestoreTimeout = 0,
    wait: Wait = True,
    namespace: Namespace = "",
    address: Address = ADDRESS,
    output: Output = Format.TABLE,
) -> None:
    """Undo a suspend: the container keeps running."""
    with agent_or_none(address) as agent:
        if agent is not None:
            from kybernate.cli.ended import resumed
            from kybernate.cli.through_agent import begun

            operation = agent.resume(container, namespace=namespace, restore_timeout=timeout)
            return _print("resume", *resumed(finished(operation)), output=output) if wait else begun(operation)
    require_wait(wait)
    from kybernate.cli.directly import carried_out
    from kybernate.cli.ended import resumed
    from kybernate.verbs.resume import Resume

    done = carried_out(Resume(container, namespace, restore_timeout=timeout), address)
    return _print("resume", *resumed(done), output=output)


def _print(verb: str, container: KnownContainer, reply: Reply, *, output: Format) -> None:
    from kybernate_shim.messages.shim_pb2 import SuspendResponse

    document = {
        "namespace": container.namespace,
        "container": container.id,
        "vram_bytes": reply.vram_bytes,
        "arena": arena_document(reply.arena) if isinstance(reply, SuspendResponse) else None,
        "steps": as_documents(reply.steps),
    }
    if show_document(document, output, container.id):
        return
    spared = sum(step.spared_bytes for step in reply.steps)
    echo(f"{DONE[verb]} {container.title}: {vram(reply.vram_bytes, spared)}")
    for line in arena_lines(reply.arena, reply.vram_bytes) if isinstance(reply, SuspendResponse) else ():
        echo(line)
    show_columns(("STEP", "TIME"), [(step.name, seconds(step.seconds)) for step in reply.steps])
