"""`kybernate pool`: the memory that this node keeps ready for images in memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.output import show_columns, size
from kybernate.cli.progress import Bar
from kybernate.node.failure import Refused
from kybernate_shim.config import DEFAULT_PATH, Config
from kybernate_shim.vram_io import image_pool as files
from kybernate_shim.vram_io.errors import VramError
from kybernate_shim.vram_io.image_pool_filling import fill
from kybernate_shim.vram_io.thread_pool import CopyOptions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(pool)


def pool(
    now: Annotated[bool, typer.Option("--fill", help="Allocate the missing memory now.")] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Free the memory; the CUDA helper allocates it again later.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show the memory that is kept ready for images in RAM.

    The node's CUDA helper fills it (`gpu.image_pool`, `gpu.image_pool_files`) while it has nothing else to do.
    """
    settings = Config.load().gpu
    if settings.image_pool is None or not settings.image_pool_files:
        raise Refused(
            "this node has no pool of memory for images",
            advice=f"set `gpu.image_pool` and `gpu.image_pool_files` in {DEFAULT_PATH}",
        )
    directory, wanted = settings.image_pool, settings.image_pool_files
    if drop:
        files.drop(directory, Counter(files.ready(directory)))
    if now:
        _fill(directory, wanted)
    ready, missing = files.ready(directory), files.lacking(directory, wanted)
    if show_document({"path": str(directory), "ready_bytes": ready, "missing_bytes": missing}, output, str(directory)):
        return
    show_columns(
        ("SIZE", "STATE"), [*((size(one), "ready") for one in ready), *((size(one), "missing") for one in missing)]
    )


def _fill(directory: Path, wanted: tuple[int, ...]) -> None:
    total = sum(files.lacking(directory, wanted))
    try:
        with Bar(f"fill {directory}") as bar:
            fill(directory, wanted, threads=CopyOptions().threads, on_progress=lambda done: bar.count(done, total))
    except VramError as error:
        raise Refused(str(error), state="checkpoints into memory work, but are slower") from error
