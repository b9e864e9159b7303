"""`kybernate images`: the checkpoint images that the registry knows, or, without an agent, those of this node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from kybernate.cli import image_table
from kybernate.cli.agents import agent_or_none, required_agent
from kybernate.cli.formats import Format, Output
from kybernate.cli.image_table import ImageEntry
from kybernate.client import Agent
from kybernate.client.errors import AgentRefused
from kybernate.node.failure import Missing
from kybernate_shim.config import Config

UNFINISHED = "unfinished"
PATTERN = frozenset("*?[")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(images)


def images(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Names, NAMESPACE/NAME, or patterns such as 'web-*'.", show_default="all"
        ),
    ] = None,
    namespace: Annotated[
        str,
        typer.Option("--namespace", "-n", metavar="NS", help="Kubernetes namespace.", show_default="all of them"),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also list leftovers of unfinished checkpoints and imports. Needs root.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only paths.")] = False,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            "-l",
            metavar="KEY=VALUE",
            help="Only images with this label.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="Only images of this workload.", show_default=False)
    ] = "",
    pinned: Annotated[bool, typer.Option("--pinned", help="Only pinned images.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List checkpoint images.

    Where an agent runs, its registry answers: the images of this node, of other nodes, and of the object store.
    Elsewhere, the images are those below the checkpoint root and the trusted roots of this node, and only root can list
    them. An image is usable when pods of its namespace, or `kybernate restore`, can restore it.
    """
    wanted = dict(_label(text) for text in labels or [])
    if wanted or workload or pinned or os.geteuid() != 0:
        with required_agent() as agent:
            listed = _registered(agent, names or [], namespace, wanted, workload, pinned=pinned)
    else:
        with agent_or_none() as agent:
            listed = _registered(agent, names or [], namespace) if agent is not None else _found(namespace)
            listed += _found(namespace, without=listed) if everything and agent is not None else []
    shown = [one for one in listed if everything or one.image.states != [UNFINISHED]]
    if missing := [name for name in names or [] if not any(one.is_named(name) for one in shown)]:
        raise Missing(
            f"no checkpoint image has the name {', '.join(missing)}", advice="`kybernate images --all` lists all images"
        )
    shown = [one for one in shown if not names or any(one.is_named(name) for name in names)]
    if quiet:
        for place in (place for one in shown for place in _places(one)):
            typer.echo(place)
    else:
        image_table.TABLE.show(output, shown)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--label")
    return key, value


def _registered(
    agent: Agent,
    names: Iterable[str],
    namespace: str,
    labels: Mapping[str, str] | None = None,
    workload: str = "",
    *,
    pinned: bool = False,
) -> list[ImageEntry]:
    """Return the images of the registry. It looks on its node's disk for a name that it does not know."""
    node = agent.node().name
    found = list(agent.images(namespace=namespace, labels=labels or {}, workload=workload, pinned=pinned))
    listed = [image_table.registered(one, node) for one in found]
    if not (labels or workload or pinned):
        unknown = (name for name in names if not PATTERN.intersection(name))
        for name in [name for name in unknown if not any(one.is_named(name) for one in listed)]:
            try:
                listed.append(image_table.registered(agent.image(name), node))
            except AgentRefused:
                continue  # the caller says which names mean nothing
    return listed


def _found(namespace: str, without: Iterable[ImageEntry] = ()) -> list[ImageEntry]:
    """Return the images in the directories of this node, except those of `without`. Raises Refused."""
    from kybernate.node.images import MOST_ENTRIES, inventory

    config = Config.load()
    found = inventory(config)
    if found.truncated:
        typer.echo(f"kybernate: only {MOST_ENTRIES} entries were examined; the list is not complete", err=True)
    known = {place for one in without for place in _places(one)}
    return [
        image_table.found(one, "ram" if one.place.root == config.memory_root else "disk")
        for one in found.images
        if namespace in ("", one.namespace) and str(one.place.path) not in known
    ]


def _places(one: ImageEntry) -> list[str]:
    return [replica.place for replica in one.here or one.image.replicas]
