"""`kybernate images`: the checkpoint images of this node, whose they are, who signed them, and which are usable."""

from __future__ import annotations

import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from kybernate.cli.options import Json
from kybernate.cli.output import age, show_columns, show_json, size
from kybernate.node.failure import Failure
from kybernate.node.images import MOST_ENTRIES, Listed, inventory
from kybernate_shim.config import Config

ID_LENGTH = 12
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
    as_json: Json = False,
) -> None:
    """List the checkpoint images of this node.

    They lie below the checkpoint root, in a directory for each Kubernetes namespace, and below the trusted roots. An
    image is usable when pods of its namespace can be restored from it, or `kybernate restore` can where it is no pod's.
    """
    found = inventory(Config.load())
    shown = [one for one in found.images if everything or one.states != ("unfinished",)]
    shown = _selected(shown, names or [], namespace)
    if found.truncated:
        typer.echo(f"kybernate: only {MOST_ENTRIES} entries were looked at; the list is not complete", err=True)
    if quiet:
        for one in shown:
            typer.echo(one.place.path)
    elif as_json:
        show_json([_document(one) for one in shown])
    else:
        show_columns(HEADER, map(_row, shown))


def _selected(images: Iterable[Listed], names: list[str], namespace: str) -> list[Listed]:
    chosen = [one for one in images if not namespace or one.namespace == namespace]
    if missing := [name for name in names if not any(_is_named(one, name) for one in chosen)]:
        raise NoSuchImage(f"no checkpoint image has the name {', '.join(missing)}")
    return [one for one in chosen if not names or any(_is_named(one, name) for name in names)]


def _is_named(image: Listed, name: str) -> bool:
    known = {image.name, image.place.name, str(image.place.path), f"{image.namespace}/{image.name}"}
    return any(fnmatchcase(one, name) for one in known)


def _row(one: Listed) -> tuple[str, ...]:
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


def _source(one: Listed) -> str:
    source = one.source
    if source.pod:
        return f"{source.pod}/{source.name}"
    return (source.container[:ID_LENGTH] if len(source.container) == 64 else source.container) or NONE


def _state(one: Listed) -> str:
    return ", ".join(("usable", *one.states) if one.usable else one.states or ("open to others",))


def _document(one: Listed) -> dict[str, Any]:
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
