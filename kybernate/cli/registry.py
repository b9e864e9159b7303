"""`kybernate registry`: the catalogue of checkpoint images, compared with the images, and made again from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.agent.settings import Settings
from kybernate.cli.options import Json
from kybernate.cli.output import show_columns, show_fields, show_json, size
from kybernate.cli.progress import Bar
from kybernate.node.failure import Failure
from kybernate.registry.location import registry_url
from kybernate_shim.config import Config

if TYPE_CHECKING:  # the other commands work without the extra `agent`, and start faster without its libraries
    from kybernate.registry.catalogue import Catalogue
    from kybernate.registry.rebuild import Outcome

SHOWN = 100
NONE = "-"

Url = Annotated[
    str,
    typer.Option(
        "--url", metavar="URL", help="The registry's database: sqlite:////PATH or postgresql://…", show_default="node's"
    ),
]


class RegistryNotInstalled(Failure):
    """The libraries of the registry are not there."""

    advice = "install the package with its extra `agent`"


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Manage the catalogue of checkpoint images.", no_args_is_help=True)
    group.command()(status)
    group.command()(check)
    group.command()(rebuild)
    app.add_typer(group, name="registry")


def status(url: Url = "", as_json: Json = False) -> None:
    """Show what the registry holds: images, their sizes, and their replicas by node and tier."""
    with _opened(url) as catalogue:
        totals, revision = catalogue.totals(), catalogue.database.revision()
        shown = catalogue.database.shown
    if as_json:
        show_json({"url": shown, "revision": revision, **asdict(totals)})
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


def check(url: Url = "", as_json: Json = False) -> None:
    """Compare the registry with the images of this node.

    The exit status is 1 when they differ; `kybernate registry rebuild` repairs that.
    """
    with _opened(url) as catalogue, Bar("check", counted=True) as bar:
        outcome = catalogue.check(_artefacts(catalogue), bar.count)
    _show(outcome, "differ", as_json=as_json)
    if outcome.differences:
        raise typer.Exit(1)


def rebuild(url: Url = "", as_json: Json = False) -> None:
    """Make the registry again from the images of this node, in one step.

    What only other nodes and object stores hold is left as it is. Labels and pins lie with the images, and come back.
    """
    with _opened(url) as catalogue, Bar("rebuild", counted=True) as bar:
        outcome = catalogue.rebuild(_artefacts(catalogue), bar.count)
    _show(outcome, "repaired", as_json=as_json)


@contextmanager
def _opened(url: str) -> Iterator[Catalogue]:
    """Open the registry that the agent uses, under the agent's name of the node. Raises RegistryNotInstalled."""
    try:
        from kybernate.registry.catalogue import Catalogue
    except ModuleNotFoundError as error:
        raise RegistryNotInstalled(f"the registry needs {error.name}, which is not installed") from error
    settings = Settings.load()
    with Catalogue(url or settings.registry or registry_url(), node=settings.node_name) as catalogue:
        yield catalogue


def _artefacts(catalogue: Catalogue) -> Any:
    from kybernate.registry.artefacts import Artefacts  # see _opened

    return Artefacts(Config.load(), catalogue.node)


def _show(outcome: Outcome, word: str, *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "images": outcome.images,
                "damaged": outcome.damaged,
                "differences": [asdict(one) for one in outcome.differences],
                "unreadable": {str(path): reason for path, reason in outcome.unreadable.items()},
                "unwritten": list(outcome.unwritten),
            }
        )
        return
    typer.echo(f"{outcome.images} images, {outcome.damaged} damaged; {len(outcome.differences)} {word}")
    if outcome.differences:
        rows = [(one.kind, one.subject, ", ".join(one.fields) or NONE) for one in outcome.differences[:SHOWN]]
        show_columns(("DIFFERENCE", "SUBJECT", "FIELDS"), rows)
    if len(outcome.differences) > SHOWN:
        typer.echo(f"and {len(outcome.differences) - SHOWN} more: --json lists all")
    for path, reason in outcome.unreadable.items():
        typer.echo(f"kybernate: {path} cannot be looked into: {reason}; what is registered there was kept", err=True)
    for reason in outcome.unwritten:
        typer.echo(f"kybernate: {reason}", err=True)
