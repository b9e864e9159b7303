"""`kybernate push`: a checkpoint image to an image registry, as an image that containerd knows, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.export import Compressed, audited, compression_of
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.image_registry import Ca, CredentialsFile, Parallel, PlainHttp, connection
from kybernate.cli.options import ImageName
from kybernate.cli.output import show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.export.reference import Reference, parsed
from kybernate.node.places import open_image
from kybernate.node.trusted import weak_files
from kybernate_shim.checkpoint.image.copies import in_use
from kybernate_shim.checkpoint.image.store import Image

if TYPE_CHECKING:
    from kybernate.export.layers import Compression
    from kybernate.export.push import Pushed
    from kybernate.export.registry_client import Connection

WEAK = (
    "kybernate: the image's digests detect damage but not forgery, so every `kybernate pull` of it asks for a"
    " confirmation. With `shared_key`, new images have digests that hold."
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(push)


def push(
    image: ImageName,
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="HOST[:PORT]/REPOSITORY[:TAG].", show_default=False)
    ],
    compression: Compressed = None,
    mount_from: Annotated[
        str,
        typer.Option(
            "--mount-from", metavar="REPOSITORY", help="Take equal layers from here, not sent.", show_default=False
        ),
    ] = "",
    plain_http: PlainHttp = False,
    ca: Ca = None,
    credentials: CredentialsFile = None,
    parallel: Parallel = 4,
    output: Output = Format.TABLE,
) -> None:  # fmt: skip
    """Push a checkpoint image to an image registry.

    Layers that the registry has are not sent. The tag is written last. An encrypted image stays encrypted. Any other
    image can be read by everyone who can pull it, with the memory and the secrets of its processes.
    """
    target, found = parsed(reference), open_image(image, near=True)
    how = connection(
        target.host, plain_http=plain_http, ca=ca, file=credentials, parallel=parallel, mount_from=mount_from
    )
    done = _pushed(found, target, how, compression_of(found, compression))
    audited(found, str(done.reference))
    if found.manifest.encryption is None and weak_files(found.manifest):
        typer.echo(WEAK, err=True)
    document = {
        "reference": str(done.reference),
        "digest": done.reference.digest,
        "layers": done.layers,
        "sent_bytes": done.sent_bytes,
        "known_bytes": done.known_bytes,
    }
    if not show_document(document, output, str(done.reference)):
        sizes = {"sent_bytes": size(done.sent_bytes), "known_bytes": size(done.known_bytes)}
        shown = {"pushed" if key == "reference" else key: sizes.get(key, value) for key, value in document.items()}
        show_fields({key.removesuffix("_bytes"): value for key, value in shown.items()})


def _pushed(image: Image, target: Reference, how: Connection, compression: Compression) -> Pushed:
    from kybernate.export.push import push as send

    try:
        with in_use(image.path), Bar(f"push {image.path.name}") as bar:
            return send(image, target, how, compression=compression, progress=bar.count)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted",
            state=f"{target} refers to what it did before",
            advice="the same command sends what is missing",
        ) from None
