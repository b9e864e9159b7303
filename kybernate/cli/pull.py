"""`kybernate pull`: a pushed or exported checkpoint image to its place on this node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.bringing_in import Wanted, bring_in
from kybernate.cli.export import require_libraries
from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.image_registry import Ca, CredentialsFile, Parallel, PlainHttp, connection
from kybernate.cli.output import show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.reporting import Interrupted
from kybernate.cli.told import tell_agent
from kybernate.export.layers import Compression
from kybernate.export.reference import parsed
from kybernate.node.failure import Failure, Refused
from kybernate.node.importing import target_of
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import Key

if TYPE_CHECKING:
    from kybernate.export.pull import Fetched
    from kybernate.export.sources import Source


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(pull)


def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]; or the path of an export, with a slash.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Its name on this node.", show_default="its original name")
    ] = "",
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", metavar="NS", help="Kubernetes namespace whose pods may restore it.",
            show_default="the one in the image",
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")] = False,
    plain_http: PlainHttp = False,
    ca: Ca = None,
    credentials: CredentialsFile = None,
    parallel: Parallel = 4,
    output: Output = Format.TABLE,
) -> None:  # fmt: skip
    """Pull a checkpoint image from an image registry, or from an export.

    Nothing is trusted before it has been compared: every layer with its digest, every file with the image's manifest.
    An image that a key of this node has signed is usable then. Any other image is shown, and imported if you confirm.
    """
    config = Config.load()
    try:
        with (
            _source(reference, plain_http, ca, credentials, parallel) as source,
            _fetched(source, reference, config) as found,
        ):
            _keep(found, Wanted(name, namespace, reference, yes=yes, move=True), config, output)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", state="nothing was kept") from None


@contextmanager
def _source(reference: str, plain_http: bool, ca: Path | None, file: Path | None, parallel: int) -> Iterator[Source]:
    """Yield the source that a reference or a path means."""
    if is_path(reference):
        with _exported(Path(reference)) as source:
            yield source
        return
    target = parsed(reference)
    how = connection(target.host, plain_http=plain_http, ca=ca, file=file, parallel=parallel)
    from kybernate.export.registry_client import ImageRegistryClient
    from kybernate.export.sources import ImageRegistrySource

    client = ImageRegistryClient(target, how)
    try:
        yield ImageRegistrySource(client)
    finally:
        client.close()


def is_path(text: str) -> bool:
    """Return whether it is a path, and not a reference."""
    return text.startswith(("/", "./", "../"))


@contextmanager
def _exported(path: Path) -> Iterator[Source]:
    require_libraries(Compression.ZSTD)
    from kybernate.export.sources import exported

    try:
        with exported(path) as source:
            yield source
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}", state="nothing was kept") from error


def import_archive(path: Path, wanted: Wanted, config: Config, output: Format) -> None:
    """Import an export that is a file, which is unpacked next to its place first."""
    with _exported(path) as source, _fetched(source, str(path), config) as found:
        _keep(found, wanted, config, output)


@contextmanager
def unpacked(path: Path, config: Config) -> Iterator[Image]:
    """Give the image of an export that is a file, in a directory that is removed afterwards."""
    with _exported(path) as source, _fetched(source, str(path), config) as found:
        yield found.image


@contextmanager
def _fetched(source: Source, reference: str, config: Config) -> Iterator[Fetched]:
    from kybernate.export.pull import fetching

    with fetching(config, "" if is_path(reference) else reference) as directory:
        with Bar(f"pull {reference}") as bar:
            found = directory.fill(source, bar.count)
        yield found


def _keep(found: Fetched, wanted: Wanted, config: Config, output: Format) -> None:
    """Put the image in its place: as it is, where a key of this node vouches for it, or by an import."""
    from kybernate.export.pull import vouching_key

    wanted = replace(wanted, name=wanted.name or found.name)
    if not wanted.name:
        raise Refused(
            f"{wanted.origin} does not say what the image was called", advice="give a name after the reference"
        )
    key = vouching_key(found.image, config)
    if key is not None and wanted.namespace in ("", found.image.manifest.source.namespace):
        _admit(found, wanted, key, config, output)
    elif found.image.manifest.encryption is not None:
        raise Failure(
            f"{wanted.origin} is encrypted, and no key that is valid here has signed it",
            state="nothing was kept",
            advice="nodes that exchange encrypted images need the same `shared_key` and `encryption_key`",
        )
    else:
        _print(bring_in(found.image.path, wanted, config, quiet=output.is_document), {}, output)


def _admit(found: Fetched, wanted: Wanted, key: Key, config: Config, output: Format) -> None:
    from kybernate.export.pull import admit_signed

    image = found.image
    target = target_of(image.path, wanted.name, image.manifest.source.namespace, config)
    with Bar(f"compare {wanted.name}") as bar:
        unaudited = admit_signed(image, target, key, wanted.origin, config, bar.count)
    if unaudited:
        typer.echo(f"kybernate: the import is not in the audit log: {unaudited}", err=True)
    tell_agent(target)
    document = {
        "path": str(target),
        "source": wanted.origin,
        "namespace": image.manifest.source.namespace,
        "digest": found.digest,
        "key": key.id,
        "bytes": image.manifest.bytes,
        "encrypted": image.manifest.encryption is not None,
    }
    shown = {"image": target, "size": size(image.manifest.bytes), "signed by": key.id, "digest": found.digest}
    _print(document, shown, output)


def _print(document: dict[str, Any], shown: dict[str, object], output: Format) -> None:
    if not show_document(document, output, document["path"]):
        show_fields(shown)
