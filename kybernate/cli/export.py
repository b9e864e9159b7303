"""`kybernate export`: a checkpoint image as an OCI image layout, or as the archive that `checkpointctl` reads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.options import ImageName
from kybernate.cli.output import show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted, not_installed
from kybernate.export.layers import Compression
from kybernate.node.audited import audit, image_ref
from kybernate.node.places import open_image
from kybernate_shim.checkpoint.image.copies import in_use
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config


class Kind(StrEnum):
    """What is written."""

    OCI = "oci"
    OCI_DIR = "oci-dir"
    CHECKPOINTCTL = "checkpointctl"


Compressed = Annotated[
    Compression | None,
    typer.Option(
        "--compression", metavar="KIND", help="zstd, gzip or none.", show_default="zstd; none for an encrypted image"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(export)


def export(
    image: ImageName,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="File or directory to make; it must not exist.", show_default=False)
    ],
    format: Annotated[
        Kind,
        typer.Option(
            "--format", "-f", metavar="FORMAT", help="oci, one file; oci-dir, a directory; or checkpointctl, one file."
        ),
    ] = Kind.OCI,
    name: Annotated[
        str,
        typer.Option("--name", metavar="REF", help="Its reference in the layout.", show_default="its name, as a tag"),
    ] = "",
    compression: Compressed = None,
    output: Output = Format.TABLE,
) -> None:  # fmt: skip
    """Write a checkpoint image to a file or a directory.

    An OCI image layout is for `ctr images import`, skopeo and other nodes; the other format is for `checkpointctl`.
    Every file is compared with the image's manifest. An encrypted image stays encrypted. `kybernate pull PATH` reads
    both.
    """
    found, target = open_image(image, near=True), path.absolute()
    chosen = compression_of(found, compression)
    if format != Kind.CHECKPOINTCTL:
        require_libraries(chosen)
    try:
        with in_use(found.path), Bar(f"export {found.path.name}") as bar:
            digest = _write(found, target, format, name or found.path.name, chosen, bar)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", state="nothing was written") from None
    audited(found, str(target))
    count = sum(one.stat().st_size for one in (target.rglob("*") if target.is_dir() else (target,)) if one.is_file())
    document = {"path": str(target), "format": format.value, "bytes": count, "digest": digest}
    if not show_document(document, output, str(target)):
        show_fields({"written": target, "size": size(count), "digest": digest})


def _write(image: Image, target: Path, format: Kind, name: str, compression: Compression, bar: Bar) -> str:
    """Write the export and return the digest of an OCI manifest, "" where there is none."""
    if format == Kind.CHECKPOINTCTL:
        from kybernate.export.checkpoint_archive import write_archive

        write_archive(image, target, bar.count)
        return ""
    from kybernate.export.oci_layout import write_layout

    directory = format == Kind.OCI_DIR
    return write_layout(image, target, name, compression=compression, directory=directory, progress=bar.count).digest


def compression_of(image: Image, wanted: Compression | None) -> Compression:
    """Return how an image's layers are compressed: encrypted bytes do not become smaller."""
    return wanted or (Compression.NONE if image.manifest.encryption is not None else Compression.ZSTD)


def require_libraries(compression: Compression) -> None:
    """Raise Unavailable where the library for this compression is missing."""
    try:
        if compression == Compression.ZSTD:
            import zstandard  # noqa: F401
    except ModuleNotFoundError as error:
        raise not_installed("an export", error, "oci") from error


def audited(image: Image, target: str) -> None:
    """Write a line to the audit log, or a warning to the terminal."""
    ref = image_ref(image.path, image.manifest, image.digest)
    if unaudited := audit("export", "done", ref, Config.load(), reason=f"to {target}"):
        typer.echo(f"kybernate: the export is not in the audit log: {unaudited}", err=True)
