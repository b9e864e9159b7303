"""`kybernate registry`: the catalogue of checkpoint images, compared with the images, and made again from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.agent.settings import Settings
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.output import show_columns, show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import not_installed
from kybernate.cli.store import run_in_store, store_place
from kybernate.registry.location import registry_url
from kybernate.store.errors import StoreDenied, StoreInconsistent, StoreInvalid, StoreUnreachable
from kybernate_shim.config import Config

if TYPE_CHECKING:  # the other commands work without the extra `agent`, and start faster without its libraries
    from kybernate.registry.catalogue import Catalogue
    from kybernate.registry.rebuild import Rebuilt

SHOWN = 100
NONE = "-"

Url = Annotated[
    str,
    typer.Option(
        "--url", metavar="URL", help="The registry's database: sqlite:////PATH or postgresql://…", show_default="node's"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Manage the catalogue of checkpoint images.", no_args_is_help=True)
    group.command()(status)
    group.command()(check)
    group.command()(rebuild)
    app.add_typer(group, name="registry")


def status(url: Url = "", output: Output = Format.TABLE) -> None:
    """Show what the registry holds: images, their sizes, and their replicas by node and tier."""
    with _opened(url) as catalogue:
        totals, revision = catalogue.totals(), catalogue.database.revision()
        shown = catalogue.database.shown
    if show_document({"url": shown, "revision": revision, **asdict(totals)}, output, shown):
        return
    show_fields(
        {
            "registry": shown,
            "revision": revision,
            "images": f"{totals.images}, {size(totals.bytes)}, {totals.pinned} pinned",
            "VRAM": size(totals.vram_bytes),
            "replicas": ", ".join(f"{count} {state}" for state, count in sorted(totals.states.items())) or "none",
        }
    )
    if totals.tiers:
        typer.echo()
        show_columns(
            ("NODE", "TIER", "REPLICAS", "SIZE"),
            [(one.node or NONE, one.tier, one.replicas, size(one.bytes)) for one in totals.tiers],
        )


def check(url: Url = "", output: Output = Format.TABLE) -> None:
    """Compare the registry with the images of this node.

    The exit status is 1 when they differ, which `kybernate registry rebuild` repairs, or when a directory could not be
    looked into.
    """
    with _opened(url) as catalogue, Bar("check", counted=True) as bar:
        outcome = catalogue.check(_artefacts(catalogue), bar.count)
    _show(outcome, "differ", output=output)
    if outcome.differences or outcome.unreadable:
        raise typer.Exit(1)


def rebuild(url: Url = "", output: Output = Format.TABLE) -> None:
    """Rebuild the registry from the images of this node, and then from those in its object store.

    What only other nodes hold is left as it is. Labels and pins lie with the images on nodes, and come back with those.
    """
    with _opened(url) as catalogue:
        with Bar("rebuild", counted=True) as bar:
            outcome = catalogue.rebuild(_artefacts(catalogue), bar.count)
        stored = _indexed(catalogue)
    _show(outcome, "repaired", stored, output=output)


@dataclass(frozen=True)
class Stored:
    """What was found out of the object store: numbers of images that were added and removed, and what is unreadable."""

    added: int
    removed: int
    unreadable: Mapping[str, str]


def _indexed(catalogue: Catalogue) -> Stored | None:
    """Take over what the object store has; one that does not answer changes nothing."""
    if not Settings.load().store.url:
        return None
    from kybernate.agent.storage.replicas import Replicas
    from kybernate.agent.storage.store_index import index_store

    place = store_place("")
    from kybernate.store.tiers.object import ObjectTier

    replicas = Replicas(lambda: catalogue, Config.load)
    try:
        with Bar("look at the store"):
            found = run_in_store(place, lambda store: index_store(ObjectTier(store, place.url), replicas))
    except (StoreUnreachable, StoreDenied, StoreInvalid, StoreInconsistent) as error:
        typer.echo(f"kybernate: {error}; what is registered of the store was kept", err=True)
        return None
    return Stored(len(found.added), len(found.removed), found.unreadable)


@contextmanager
def _opened(url: str) -> Iterator[Catalogue]:
    """Open the registry that the agent uses, under the agent's name of the node. Raises Unavailable."""
    try:
        from kybernate.registry.catalogue import Catalogue
    except ModuleNotFoundError as error:
        raise not_installed("the registry", error, "agent") from error
    settings = Settings.load()
    with Catalogue(url or settings.registry or registry_url(), node=settings.node_name) as catalogue:
        yield catalogue


def _artefacts(catalogue: Catalogue) -> Any:
    from kybernate.registry.artefacts import Artefacts  # see _opened

    return Artefacts(Config.load(), catalogue.node)


def _show(outcome: Rebuilt, word: str, stored: Stored | None = None, *, output: Format) -> None:
    document = {
        "images": outcome.images,
        "damaged": outcome.damaged,
        "differences": [asdict(one) for one in outcome.differences],
        "unreadable": {str(path): reason for path, reason in outcome.unreadable.items()},
        "unwritten": list(outcome.unwritten),
        **({"store": asdict(stored)} if stored is not None else {}),
    }
    if show_document(document, output, "\n".join(one.subject for one in outcome.differences)):
        return
    typer.echo(f"{outcome.images} images, {outcome.damaged} damaged; {len(outcome.differences)} {word}")
    if outcome.differences:
        rows = [(one.kind, one.subject, ", ".join(one.fields) or NONE) for one in outcome.differences[:SHOWN]]
        show_columns(("DIFFERENCE", "SUBJECT", "FIELDS"), rows)
    if len(outcome.differences) > SHOWN:
        typer.echo(f"and {len(outcome.differences) - SHOWN} more: -o json lists all")
    if stored is not None:
        typer.echo(f"store: {stored.added} images added, {stored.removed} removed")
        for place, reason in stored.unreadable.items():
            typer.echo(f"kybernate: {place} cannot be read: {reason}", err=True)
    for path, reason in outcome.unreadable.items():
        typer.echo(f"kybernate: {path} cannot be looked into: {reason}; what is registered there was kept", err=True)
    for reason in outcome.unwritten:
        typer.echo(f"kybernate: {reason}", err=True)
