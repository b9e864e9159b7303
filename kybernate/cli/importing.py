"""`kybernate import`: examine a checkpoint image from elsewhere, sign it, and put it where pods may name it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kybernate.cli.bringing_in import Wanted, bring_in
from kybernate.cli.formats import Format, Output, show_document
from kybernate.node.places import locate
from kybernate_shim.config import Config


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="import")(import_image)


def import_image(
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE", help="Directory of the image, or its name; or the path of an archive.", show_default=False
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Its new name.", show_default="the old one")] = "",
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NS",
            help="Kubernetes namespace whose pods may restore it.",
            show_default="the one in the image",
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")] = False,
    move: Annotated[
        bool | None,
        typer.Option(
            "--move/--copy",
            help="Remove the image from its old place.",
            show_default="--move inside the checkpoint root",
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Import a checkpoint image from another node.

    Compares every byte with the image's manifest, shows what the image requests, and asks for a confirmation. Then it
    signs the image with the node's key and puts it into the directory of the namespace. An image that is not a pod's
    belongs to root alone, for `kybernate restore`. Nothing of an image is trusted before that.
    """
    if output.is_document and not yes:
        raise typer.BadParameter(f"{output} needs --yes", param_hint="--output")
    config = Config.load()
    source = locate(image)
    if os.path.isfile(source):  # noqa: PTH113  # no word is too long for it
        from kybernate.cli.pull import import_archive  # few images come as one file

        wanted = Wanted(name, namespace, str(source), yes=yes, move=True)
        import_archive(source, wanted, config, output)
        return
    inside = source.is_relative_to(config.checkpoint_root)
    moved = inside if move is None else move
    wanted = Wanted(name or source.name, namespace, str(source), yes=yes, move=moved, known=inside)
    document = bring_in(source, wanted, config, quiet=output.is_document)
    show_document(document, output, document["path"])
