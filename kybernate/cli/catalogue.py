"""`kybernate rm` and `label`: changes of the images that the agent's registry has."""

from __future__ import annotations

from typing import Annotated

import typer

from kybernate.cli import image_table
from kybernate.cli.agents import finished, named_here, required_agent
from kybernate.cli.asking import require_agreement
from kybernate.cli.completion import an_image
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.image_table import ImageEntry
from kybernate.cli.ops import TABLE
from kybernate.cli.options import Wait
from kybernate.cli.output import printable
from kybernate.client import Agent
from kybernate.client.errors import AgentRefused
from kybernate.messages import agent_pb2 as wire

GONE = "NOT_FOUND"

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE...", help="Names, NAMESPACE/NAME, ids, or directories.", show_default=False,
        autocompletion=an_image,
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(rm)
    app.command()(label)


def rm(
    images: Names,
    force: Annotated[bool, typer.Option("--force", help="Also delete pinned images.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")] = False,
    wait: Wait = True,
    output: Output = Format.TABLE,
) -> None:
    """Delete images from the agent's node.

    Refused while an image is pinned, or a restore reads it. Copies of other nodes and of the object store remain:
    `kybernate store rm` removes the latter.
    """
    with required_agent() as agent:
        listed = "\n".join(f"  {printable(one)}" for one in images)
        require_agreement(f"Delete from the node:\n{listed}\n?", yes=yes, state="nothing was deleted")
        begun = [agent.delete_image(named_here(one), force=force) for one in images]
        if not wait:
            TABLE.show(Format.NAME if output == Format.TABLE else output, [one.state for one in begun])
            return
        ended = [finished(one) for one in begun]
        if output.is_document or output == Format.NAME:
            TABLE.show(output, ended)
            return
        for name, one in zip(images, ended, strict=True):
            typer.echo(f"deleted {printable(one.result.path or name)}")
            for place in _remaining(agent, name, one):
                typer.echo(f"kybernate: a copy remains: {printable(place)}", err=True)


def _remaining(agent: Agent, name: str, done: wire.Operation) -> list[str]:
    """Return the places of copies that the registry still has under the name."""
    if name.startswith(("/", "./", "../")):
        return []
    try:
        return [one.place for one in agent.image(name).replicas if one.place != done.result.path]
    except AgentRefused as error:
        if error.code != GONE:
            raise
        return []


def label(
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE", help="Name, NAMESPACE/NAME, id, or directory.", show_default=False,
            autocompletion=an_image,
        ),
    ],
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE|KEY-...", help="Labels to set, and with a hyphen labels to remove.", show_default=False
        ),
    ],
    output: Output = Format.TABLE,
) -> None:  # fmt: skip
    """Set or remove labels of an image, as `kubectl label` does."""
    changed, removed = changes_of(changes)
    with required_agent() as agent:
        done = agent.label(named_here(image), changed, removed=removed)
        entry = image_table.registered(done, agent.node().name)
    if not show_document(image_table.document(entry), output, done.id):
        typer.echo(f"labelled {_title(entry)}: {_words(done)}")


def changes_of(changes: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the labels to set, and the keys of those to remove. Raises BadParameter."""
    changed: dict[str, str] = {}
    removed: list[str] = []
    for one in changes:
        key, equals, value = one.partition("=")
        if equals and key:
            changed[key] = value
        elif not equals and one.endswith("-") and len(one) > 1:
            removed.append(one[:-1])
        else:
            raise typer.BadParameter(f"{one!r} is neither KEY=VALUE nor KEY-", param_hint="KEY=VALUE|KEY-")
    if both := sorted(set(changed) & set(removed)):
        raise typer.BadParameter(f"{', '.join(both)} cannot be both set and removed", param_hint="KEY=VALUE|KEY-")
    return changed, removed


def _title(entry: ImageEntry) -> str:
    return printable(", ".join(entry.names) or entry.image.id)


def _words(image: wire.Image) -> str:
    return printable(",".join(f"{key}={value}" for key, value in sorted(image.labels.items()))) or "no labels"
