"""`kybernate suspend` and `resume`: VRAM into host memory and back, while the container stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kybernate.cli.agents import agent_or_none, require_wait
from kybernate.cli.declared import Option
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.moved import arena_document, arena_lines, as_documents, vram
from kybernate.cli.options import ADDRESS, Address, ContainerName, Namespace, Wait
from kybernate.cli.output import echo, seconds, show_columns
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted

# One of two ways is taken: by the agent, or by containerd and the shim. The commands load what it needs, no more.
if TYPE_CHECKING:
    from typer import Typer

    from kybernate.node.lookup import KnownContainer
    from kybernate_shim.messages.shim_pb2 import ResumeResponse, SuspendResponse

    Reply = SuspendResponse | ResumeResponse

LockTimeout = Annotated[
    float,
    Option(("--timeout",), "For the CUDA driver's lock.", metavar="SECONDS", least=0, default="as configured"),
]
RestoreTimeout = Annotated[
    float,
    Option(("--timeout",), "For the CUDA driver's restore.", metavar="SECONDS", least=0, default="as configured"),
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
            from kybernate.cli.through_agent import begun, suspended

            operation = agent.suspend(container, namespace=namespace, lock_timeout=timeout)
            return _print("suspend", *suspended(operation), output=output) if wait else begun(operation)
    require_wait(wait)
    return _run("suspend", container, namespace, address, timeout, output=output)


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
            from kybernate.cli.through_agent import begun, resumed

            operation = agent.resume(container, namespace=namespace, restore_timeout=timeout)
            return _print("resume", *resumed(operation), output=output) if wait else begun(operation)
    require_wait(wait)
    return _run("resume", container, namespace, address, timeout, output=output)


def _run(verb: str, query: str, namespace: str, address: str, timeout: float, *, output: Format) -> None:
    import asyncio

    from kybernate.node.containerd import Containerd

    with Containerd(address) as containerd:
        container = containerd.find(query, namespace)
    try:
        with Bar(f"{verb} {container.title}") as bar:
            reply = asyncio.run(_call(verb, container, containerd.address, round(timeout * 1000), bar))
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted", state=f"the shim continues the {verb}", advice=f"see `kybernate status {container.id}`"
        ) from None
    _print(verb, container, reply, output=output)


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
    echo(f"{DONE[verb]} {container.title}: {vram(reply)}")
    for line in arena_lines(reply) if isinstance(reply, SuspendResponse) else ():
        echo(line)
    show_columns(("STEP", "TIME"), [(step.name, seconds(step.seconds)) for step in reply.steps])


async def _call(verb: str, container: KnownContainer, address: str, timeout_ms: int, bar: Bar) -> Reply:
    from kybernate.node.shim import ShimRefused, shim_of, state_now, watching
    from kybernate_shim.messages.shim_pb2 import ResumeRequest, SuspendRequest

    try:
        async with shim_of(container, address) as shim, watching(shim, container.id, bar.show):
            if verb == "suspend":
                return await shim.suspend(SuspendRequest(id=container.id, timeout_ms=timeout_ms))
            return await shim.resume(ResumeRequest(id=container.id, timeout_ms=timeout_ms))
    except ShimRefused as error:
        error.args = (f"cannot {verb} {container.title}: {error}",)
        error.state = await state_now(container, address)
        raise
