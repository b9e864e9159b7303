"""`kybernate release`: let a container run on that `checkpoint --hold` has left frozen."""

from __future__ import annotations

import asyncio

import typer

from kybernate.cli.options import ADDRESS, Address, ContainerName, Json, Namespace
from kybernate.cli.output import show_json
from kybernate.node.containerd import Containerd
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import ShimRefused, shim_of, state_now
from kybernate_shim.messages import shim_pb2 as wire


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(release)


def release(
    container: ContainerName, namespace: Namespace = "", address: Address = ADDRESS, as_json: Json = False
) -> None:
    """Let a held container run on.

    Its image stays: it is as one of a container that was not ended.
    """
    with Containerd(address) as containerd:
        found = containerd.find(container, namespace)
    now = asyncio.run(_release(found, containerd.address))
    if as_json:
        show_json({"namespace": found.namespace, "container": found.id, "state": now.state})
    else:
        typer.echo(f"released {found.title}: it is {now.state}")


async def _release(container: KnownContainer, address: str) -> wire.Container:
    try:
        async with shim_of(container, address) as shim:
            return await shim.release(container.id)
    except ShimRefused as error:
        error.args = (f"cannot release {container.title}: {error}",)
        error.state = await state_now(container, address)
        raise
