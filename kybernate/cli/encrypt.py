"""`kybernate encrypt` and `kybernate decrypt`: a checkpoint image that exists changes its form where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.formats import Format, Output, show_document
from kybernate.cli.options import ImageName
from kybernate.cli.output import show_fields, size
from kybernate.cli.progress import Bar
from kybernate.cli.told import tell_agent
from kybernate.node import failure
from kybernate.node.failure import Failure
from kybernate.node.places import locate, unfound
from kybernate_shim.checkpoint.image.counter import Counter
from kybernate_shim.checkpoint.image.encrypted import CipherRun
from kybernate_shim.checkpoint.image.encryption_in_place import EncryptionChange, decrypt_image, encrypt_image
from kybernate_shim.checkpoint.image.store import CheckpointNotFound, Image
from kybernate_shim.config import DEFAULT_PATH, Config
from kybernate_shim.errors import Damaged, NoRoom, Refused

Work = Callable[[Path, CipherRun], tuple[Image, EncryptionChange]]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="File with the keys.", show_default="`encryption_key` of the node's configuration"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(encrypt)
    app.command()(decrypt)


def encrypt(image: ImageName, key: KeyFile = None, output: Output = Format.TABLE) -> None:
    """Encrypt a checkpoint image in place.

    An image that is encrypted with an older key of the file gets the first one; only its manifest changes.
    The image is complete at all times, encrypted or not. Until the end, a second copy needs space.
    """
    config = Config.load()
    file = key or config.encryption_key
    if file is None:
        raise failure.Refused(
            "this node has no key for checkpoint images",
            advice=f"name a file with --key, or set `encryption_key` in {DEFAULT_PATH}; `openssl rand -hex 32` makes"
            " a key",
        )
    _change("encrypt", image, lambda directory, run: encrypt_image(directory, file, config, run), output=output)


def decrypt(image: ImageName, key: KeyFile = None, output: Output = Format.TABLE) -> None:
    """Decrypt a checkpoint image in place, so that its files are plain files on the disk."""
    config = Config.load()
    file = key or config.encryption_key
    _change("decrypt", image, lambda directory, run: decrypt_image(directory, file, config, run), output=output)


def _change(verb: str, name: str, work: Work, *, output: Format) -> None:
    with Bar(f"{verb} {name}") as bar:
        found, outcome = _changed(verb, name, work, CipherRun(Counter(lambda done: bar.count(done, 0))))
    tell_agent(found.path)
    encryption = found.manifest.encryption
    key_id = encryption.key_id if encryption else ""
    document = {"path": str(found.path), "outcome": outcome, "key_id": key_id, "bytes": found.manifest.bytes}
    if show_document(document, output, str(found.path)):
        return
    show_fields({
        "path": found.path,
        "outcome": outcome,
        "key": key_id,
        "size": size(found.manifest.bytes),
    })  # fmt: skip


def _changed(verb: str, name: str, work: Work, run: CipherRun) -> tuple[Image, EncryptionChange]:
    try:
        return work(locate(name), run)
    except CheckpointNotFound as error:
        raise unfound(name, error) from error
    except Damaged as error:
        raise Failure(f"cannot {verb} the image: {error}", state="the image is as it was") from error
    except (Refused, NoRoom, OSError) as error:
        raise Failure(f"cannot {verb} the image: {error}", state="the image is as it was") from error
