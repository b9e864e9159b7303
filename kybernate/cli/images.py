"""`kybernate images`: the checkpoint images of this node, whose they are, who signed them, and which are usable."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from kybernate.cli import elsewhere
from kybernate.cli.agents import required_agent
from kybernate.cli.elsewhere import images_elsewhere
from kybernate.cli.formats import Format, Output
from kybernate.cli.options import Json
from kybernate.cli.output import age, show_columns, show_json, size
from kybernate.cli.registered import is_named, registered
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure
from kybernate.node.images import MOST_ENTRIES, ListedImage, inventory
from kybernate.node.lookup import short_id
from kybernate_shim.config import Config

HEADER = ("NAME", "NAMESPACE", "SOURCE", "SIZE", "AGE", "SIGNED BY", "STATE")
NONE = "-"


class NoSuchImage(Failure):
    """No image has one of the names."""

    advice = "`kybernate images --all` lists what there is"


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
        bool, typer.Option("--all", help="Also list what unfinished checkpoints and imports have left.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print paths only.")] = False,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            "-l",
            metavar="KEY=VALUE",
            help="Only with this label, in the agent's registry.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="Only of this workload, in the registry.", show_default=False)
    ] = "",
    pinned: Annotated[bool, typer.Option("--pinned", help="Only pinned ones, in the registry.")] = False,
    output: Output = Format.TABLE,
    as_json: Json = False,
) -> None:
    """List the checkpoint images of this node, and where an agent runs, those of other nodes and of the object store.

    Those of this node lie below the checkpoint root, in a directory for each Kubernetes namespace, and below the
    trusted roots. An image is usable when pods of its namespace can be restored from it, or `kybernate restore` can
    where it is no pod's.
    """
    asks_registry = bool(labels or workload or pinned or output != Format.TABLE)
    if asks_registry or os.geteuid() != 0:  # the images themselves are root's; the registry is for readers, too
        with required_agent() as agent:
            return registered(
                agent,
                names or [],
                namespace,
                labels or [],
                workload,
                pinned=pinned,
                format=Format.JSON if as_json else output,
                quiet=quiet,
            )
    found = inventory(Config.load())
    away = images_elsewhere({str(one.place.path) for one in found.images}, namespace, names or [])
    shown = [one for one in found.images if everything or one.states != ("unfinished",)]
    shown = _selected(shown, names or [], namespace, away)
    if found.truncated:
        typer.echo(f"kybernate: only {MOST_ENTRIES} entries were examined; the list is not complete", err=True)
    if quiet:
        for one in shown:
            typer.echo(one.place.path)
    elif as_json:
        show_json([*map(_document, shown), *map(elsewhere.document, away)])
    else:
        show_columns(HEADER, [*map(_row, shown), *map(elsewhere.row, away)])
    return None


def _selected(
    images: Iterable[ListedImage], names: list[str], namespace: str, away: Sequence[wire.Image]
) -> list[ListedImage]:
    chosen = [one for one in images if not namespace or one.namespace == namespace]
    unknown = (name for name in names if not any(is_named(one, name) for one in away))
    if missing := [name for name in unknown if not any(_is_named(one, name) for one in chosen)]:
        raise NoSuchImage(f"no checkpoint image has the name {', '.join(missing)}")
    return [one for one in chosen if not names or any(_is_named(one, name) for name in names)]


def _is_named(image: ListedImage, name: str) -> bool:
    known = {image.name, image.place.name, str(image.place.path), f"{image.namespace}/{image.name}"}
    return any(fnmatchcase(one, name) for one in known)


def _row(one: ListedImage) -> tuple[str, ...]:
    made = one.time
    return (
        one.name,
        one.namespace or NONE,
        _source(one),
        size(one.bytes) if one.image else NONE,
        age(time.time() - made.timestamp()) if made else NONE,
        str(one.signed) if one.signed else NONE,
        _state(one),
    )


def _source(one: ListedImage) -> str:
    source = one.source
    if source.pod:
        return f"{source.pod}/{source.name}"
    return short_id(source.container) or NONE


def _state(one: ListedImage) -> str:
    return ", ".join(("usable", *one.states) if one.usable else one.states or ("open to others",))


def _document(one: ListedImage) -> dict[str, Any]:
    manifest = one.image.manifest if one.image else None
    return {
        "name": one.name,
        "namespace": one.namespace,
        "path": str(one.place.path),
        "pod": one.source.pod,
        "container": one.source.name or one.source.container,
        "bytes": one.bytes,
        "time": manifest.time if manifest else None,
        "key": one.signed.id if one.signed else "",
        "signature": (one.signed.fault or "valid") if one.signed else None,
        "usable": one.usable,
        "states": list(one.states),
        "reason": one.reason,
    }
