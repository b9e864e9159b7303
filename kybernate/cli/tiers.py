"""`kybernate promote`, `demote`, `prefetch`, `evict`, `pin` and `unpin`: where the agent keeps images."""

from __future__ import annotations

from typing import Annotated

import typer

from kybernate.cli.agents import finished, named_here, required_agent, seconds_of
from kybernate.cli.completion import a_tier, an_image
from kybernate.cli.formats import Format, Output, document_of, show_document
from kybernate.cli.options import ImageName, Wait
from kybernate.cli.output import seconds, show_fields, size
from kybernate.cli.through_agent import begun
from kybernate.client import Operation

RAM, DISK, OBJECT = "ram", "disk", "object"

To = Annotated[str, typer.Option("--to", metavar="TIER", help="ram, disk or object.", autocompletion=a_tier)]
Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE...",
        help="Names, NAMESPACE/NAME, ids, or directories.",
        show_default=False,
        autocompletion=an_image,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (promote, demote, prefetch, evict, pin, unpin):
        app.command()(command)


def promote(image: ImageName, to: To = RAM, wait: Wait = True, output: Output = Format.TABLE) -> None:
    """Copy an image into a faster tier; its other copies stay.

    A restore by name then reads it from there. An interrupted copy continues where it stopped.
    """
    with required_agent() as agent:
        _moved(agent.copy_image(named_here(image), to), wait=wait, output=output)


def demote(image: ImageName, to: To = DISK, wait: Wait = True, output: Output = Format.TABLE) -> None:
    """Copy an image into a slower tier, and remove it from the faster ones.

    Nothing is removed before the copy is complete and compared with the image's manifest.
    """
    with required_agent() as agent:
        _moved(agent.copy_image(named_here(image), to, demote=True, priority="request"), wait=wait, output=output)


def prefetch(image: ImageName, to: To = RAM, wait: Wait = False, output: Output = Format.TABLE) -> None:
    """Copy an image into a faster tier in the background.

    The copy pauses while other transfers need the disk or the network.
    """
    with required_agent() as agent:
        _moved(agent.copy_image(named_here(image), to, priority="prefetch"), wait=wait, output=output)


def evict(
    image: ImageName,
    tier: Annotated[
        str, typer.Option("--from", metavar="TIER", help="ram, disk or object.", autocompletion=a_tier)
    ] = RAM,
    wait: Wait = True,
    output: Output = Format.TABLE,
) -> None:
    """Remove an image from a tier.

    Refused where no other tier has a good copy; that copy is read to find out.
    """
    with required_agent() as agent:
        _moved(agent.evict_image(named_here(image), tier), wait=wait, output=output)


def pin(images: Images) -> None:
    """Keep images from being deleted or evicted by the node's policy."""
    _pin(images, pinned=True)


def unpin(images: Images) -> None:
    """Unpin images, so that the policy may delete or evict them again."""
    _pin(images, pinned=False)


def _pin(images: list[str], *, pinned: bool) -> None:
    with required_agent() as agent:
        for image in images:
            done = agent.pin(named_here(image), pinned=pinned)
            others = sorted({replica.name for replica in done.replicas} - {done.name, ""})
            also = f", which is also {', '.join(others)}" if others else ""
            typer.echo(f"{'pinned' if pinned else 'unpinned'} {done.name}{also}")


def _moved(operation: Operation, *, wait: bool, output: Format) -> None:
    if not wait:
        begun(operation)
        return
    ended = finished(operation)
    if show_document(document_of(ended), output, ended.id):
        return
    took = seconds_of(ended)
    rate = f", {size(round(ended.result.bytes / took))}/s" if took and ended.verb == "copy" else ""
    show_fields({"image": ended.result.path, "size": size(ended.result.bytes), "time": f"{seconds(took)}{rate}"})
