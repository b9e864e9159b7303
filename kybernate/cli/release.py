"""`kybernate release`: let a container continue that `checkpoint --hold` has left frozen."""

from __future__ import annotations

import asyncio

import typer

from kybernate.cli.agents import require_here
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.options import ADDRESS, Address, ContainerName, Namespace
from kybernate.node.containerd import Containerd
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import ShimRefused, shim_of, state_now
from kybernate_shim.messages import shim_pb2 as wire


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(release)


def release(
    container: ContainerName, namespace: Namespace = "", address: Address = ADDRESS, output: Output = Format.TABLE
) -> None:
    """Let a held container continue.

    Its image stays, as the image of any container that keeps running does.
    """
    require_here("the shim of a container is called on its own node")
    with Containerd(address) as containerd:
        found = containerd.find(container, namespace)
    now = asyncio.run(_release(found, containerd.address))
    document = {"namespace": found.namespace, "container": found.id, "state": now.state}
    if not show_document(document, output, found.id):
        typer.echo(f"released {found.title}: it is {now.state}")


async def _release(container: KnownContainer, address: str) -> wire.Container:
    try:
        async with shim_of(container, address) as shim:
            return await shim.release(container.id)
    except ShimRefused as error:
        error.args = (f"cannot release {container.title}: {error}",)
        error.state = await state_now(container, address)
        raise
