"""`kybernate keys`: the keys by which this node recognizes its own checkpoint images."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated, Any

import typer

from kybernate.cli.asking import require_agreement
from kybernate.cli.formats import Format, Output, Table, rfc3339, show_document
from kybernate.cli.output import age, show_columns, show_fields
from kybernate.node import keys
from kybernate.node.images import inventory
from kybernate.node.trusted import KeyFile, known_keys
from kybernate_shim.config import Config

HEADER = ("ID", "KIND", "FILE", "CREATED", "IMAGES")
SHOWN = 20
ListedKey = tuple[KeyFile, Counter[str]]  # with how many images each key has signed


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Manage the keys that sign and verify checkpoint images.", no_args_is_help=True)
    group.command(name="list")(list_keys)
    group.command()(rotate)
    group.command()(revoke)
    group.command()(path)
    app.add_typer(group, name="keys")


def list_keys(output: Output = Format.TABLE) -> None:
    """List the keys that are valid on this node, the one that signs first, and how many images each has signed."""
    config = Config.load()
    signed = Counter(one.signed.id for one in inventory(config).images if one.signed and one.signed.key)
    found = known_keys(config)
    TABLE.show(output, [(file, signed) for file in found])
    if output.is_document:
        return
    for file in found:
        if file.fault:
            typer.echo(f"kybernate: {file.fault}", err=True)


def rotate(output: Output = Format.TABLE) -> None:
    """Make a new node key. Images signed by the old one stay valid until it is revoked."""
    old, new = keys.rotate_key(Config.load())
    if show_document({"old": old.id if old else "", "new": new.id, "file": str(new.source)}, output, new.id):
        return
    show_fields({"new key": new.id, "file": new.source, "old key": f"{old.id}, in {old.source}" if old else "none"})
    if shared := Config.load().shared_key:
        typer.echo(f"\nNew images are still signed by the shared key {shared}.")


def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="Identifier of the key.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")] = False,
) -> None:
    """Delete a key. Images that it has signed are no longer restored, until `kybernate import` signs them again."""
    config = Config.load()
    files = keys.files_of(id, config)
    signed = [str(one.place.path) for one in inventory(config).images if one.signed and one.signed.id == id]
    for file in files:
        typer.echo(f"{file.kind} key {id}, {file.path}")
    if signed:
        typer.echo(f"images that become unusable: {len(signed)}")
        show_columns(("PATH",), [(one,) for one in signed[:SHOWN]], indent="  ")
        if len(signed) > SHOWN:
            typer.echo(f"  and {len(signed) - SHOWN} more; `kybernate images` lists them")
    else:
        typer.echo("no image on this node is signed by it")
    require_agreement("Delete the key? It cannot be recovered.", yes=yes, state="the key is still valid")
    keys.remove(files)
    typer.echo(f"revoked {id}")


def path() -> None:
    """Print the directory of the keys."""
    typer.echo(Config.load().key_directory)


def _row(one: ListedKey) -> tuple[object, ...]:
    file, signed = one
    made = keys.made_at(file.path)
    return (
        file.key.id if file.key else "-",
        file.kind if file.key else f"{file.kind}, unusable",
        file.path,
        f"{age(time.time() - made)} ago" if made else "-",
        signed[file.key.id] if file.key else "-",
    )


def _document(one: ListedKey) -> dict[str, Any]:
    file, signed = one
    return {
        "id": file.key.id if file.key else "",
        "kind": file.kind,
        "file": str(file.path),
        "created": rfc3339(keys.made_at(file.path) or 0),
        "images": signed[file.key.id] if file.key else 0,
        "problem": file.fault,
    }


def _name(one: ListedKey) -> str:
    return one[0].key.id if one[0].key else str(one[0].path)


TABLE = Table(HEADER, _row, _document, len(HEADER), _name)
