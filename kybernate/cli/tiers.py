"""`kybernate promote`, `demote`, `prefetch`, `evict`, `pin` and `unpin`: where the agent keeps images."""

from __future__ import annotations

from typing import Annotated

import typer

from kybernate.cli.agents import finished, required_agent, seconds_of
from kybernate.cli.options import ImageName, Json, Wait
from kybernate.cli.output import seconds, show_fields, show_json, size
from kybernate.cli.through_agent import begun
from kybernate.client import Operation

RAM, DISK, OBJECT = "ram", "disk", "object"

To = Annotated[str, typer.Option("--to", metavar="TIER", help="ram, disk or object.")]
Images = Annotated[
    list[str],
    typer.Argument(metavar="IMAGE...", help="Names, NAMESPACE/NAME, or ids.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (promote, demote, prefetch, evict, pin, unpin):
        app.command()(command)


def promote(image: ImageName, to: To = RAM, wait: Wait = True, as_json: Json = False) -> None:
    """Copy an image into a faster tier; its other copies stay.

    A restore by name then reads it from there. An interrupted copy continues where it stopped.
    """
    with required_agent() as agent:
        _moved(agent.copy_image(image, to), wait=wait, as_json=as_json)


def demote(image: ImageName, to: To = DISK, wait: Wait = True, as_json: Json = False) -> None:
    """Copy an image into a slower tier, and remove it from the faster ones.

    Nothing is removed before the copy is complete and compared with the image's manifest.
    """
    with required_agent() as agent:
        _moved(agent.copy_image(image, to, demote=True, priority="request"), wait=wait, as_json=as_json)


def prefetch(image: ImageName, to: To = RAM, wait: Wait = False, as_json: Json = False) -> None:
    """Copy an image into a faster tier in the background: it pauses while others need the disk or the network."""
    with required_agent() as agent:
        _moved(agent.copy_image(image, to, priority="prefetch"), wait=wait, as_json=as_json)


def evict(
    image: ImageName,
    tier: Annotated[str, typer.Option("--from", metavar="TIER", help="ram, disk or object.")] = RAM,
    wait: Wait = True,
    as_json: Json = False,
) -> None:
    """Remove an image from a tier. Refused where no other tier has a good copy: that one is read to find out."""
    with required_agent() as agent:
        _moved(agent.evict_image(image, tier), wait=wait, as_json=as_json)


def pin(images: Images) -> None:
    """Keep images from being deleted or evicted by the node's policy."""
    _pin(images, pinned=True)


def unpin(images: Images) -> None:
    """Take pins from images."""
    _pin(images, pinned=False)


def _pin(images: list[str], *, pinned: bool) -> None:
    with required_agent() as agent:
        for image in images:
            typer.echo(f"{'pinned' if pinned else 'unpinned'} {agent.pin(image, pinned=pinned).name}")


def _moved(operation: Operation, *, wait: bool, as_json: bool) -> None:
    if not wait:
        begun(operation)
        return
    ended = finished(operation)
    if as_json:
        show_json(
            {
                "operation": ended.id,
                "verb": ended.verb,
                "id": ended.result.image_id,
                "place": ended.result.path,
                "bytes": ended.result.bytes,
                "seconds": seconds_of(ended),
            }
        )
        return
    took = seconds_of(ended)
    rate = f", {size(round(ended.result.bytes / took))}/s" if took and ended.verb == "copy" else ""
    show_fields({"image": ended.result.path, "size": size(ended.result.bytes), "time": f"{seconds(took)}{rate}"})
