"""An exported image into a directory of this node, and to its place, once it is known what it is worth.

A signature that is valid here, with digests that no forger can meet, makes the image usable as it is, encrypted or not.
Every other image is examined, shown, and signed by an administrator's consent: that is an import.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kybernate.export.documents import ArtefactInvalid
from kybernate.export.layer_record import LayerRecord
from kybernate.export.sources import Source
from kybernate.export.unpack import Unpacking
from kybernate.node.audited import audit, image_ref
from kybernate.node.failure import Failure, Unavailable
from kybernate.node.images import STAGING
from kybernate.node.reading import OnProgress
from kybernate.node.trusted import known_keys, ring_of, signature_of, weak_files
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image, listed, read_image
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.config import Config
from kybernate_shim.errors import NoRoom, Refused
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.locks import held, try_lock_directory
from kybernate_shim.linux.private_files import DIRECTORY_MODE
from kybernate_shim.trust.keys import Key
from kybernate_shim.trust.places import make_private

NOTHING = "nothing was kept"


@dataclass(frozen=True)
class Fetched:
    """An image in a directory of its own. `name` is what it was called, "" if unusable; `digest` is OCI's."""

    image: Image
    name: str
    digest: str


class Fetching:
    """A hidden directory of this node for one image; `continued`: layers that are there are not fetched again."""

    def __init__(self, directory: Path, *, continued: bool = False) -> None:
        self._directory, self._continued = directory, continued

    def fill(self, source: Source, progress: OnProgress = lambda done, total: None) -> Fetched:
        """Fetch an image, of which nothing is trusted yet: its files are those of its manifest, by name and size.

        Raises ArtefactInvalid, Failure, and what the source raises.
        """
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress(done, unpacking.total)

        try:
            record = LayerRecord(self._directory) if self._continued else None
            unpacking = Unpacking(self._directory, count, record)
            origin = source.fill(unpacking)
            unpacking.finish()
            image = read_image(self._directory)
        except (OSError, NoRoom) as error:
            raise Failure(f"the image cannot be stored: {error}", state=NOTHING) from error
        except CheckpointInvalid as error:
            raise ArtefactInvalid(str(error)) from error
        return Fetched(image, origin.name if IMAGE_NAME.fullmatch(origin.name) else "", origin.digest)


@contextmanager
def fetching(config: Config, reference: str = "") -> Iterator[Fetching]:
    """Give a directory for an image, which may be moved away; it is removed afterwards. Raises Failure.

    One of a `reference` stays where the image registry was not reached any more, or the process was killed: the next
    pull of the reference continues there.
    """
    name = sha256(reference.encode()).hexdigest()[:16] if reference else os.urandom(8).hex()
    directory = config.checkpoint_root / f"{STAGING}{name}"
    try:
        make_private(config.checkpoint_root)
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=bool(reference))
        lock = try_lock_directory(directory)
    except (OSError, Refused) as error:
        raise Failure(f"{config.checkpoint_root} cannot be written: {error}", state=NOTHING) from error
    if lock is None:
        raise Failure(f"another command pulls {reference}", state=NOTHING, advice="wait for its end")
    with held(lock):
        try:
            yield Fetching(directory, continued=bool(reference))
        except Unavailable:
            if not reference:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)


def vouching_key(image: Image, config: Config) -> Key | None:
    """Return the key by which the image is trusted as it is, None where an administrator has to decide.

    The bytes were in other hands. So digests must hold against a forger, unless the image is encrypted, and with that
    authenticated, under a key of this node.
    """
    key = signature_of(image, ring_of(known_keys(config))).key
    weak = image.manifest.encryption is None and weak_files(image.manifest)
    return None if weak else key


def admit_signed(
    image: Image, target: Path, key: Key, origin: str, config: Config, progress: OnProgress = lambda done, total: None
) -> str:
    """Compare every byte of a fetched image with its manifest, and move it to `target`, unchanged.

    Return why the audit log has no line of it, "" if it has one. Raises Failure; the image is removed then.
    """
    ref = image_ref(target, image.manifest, image.digest)
    try:
        _require_whole(image, config, progress)
        _place(image.path, target)
    except Failure as error:
        audit("import", "failed", ref, config, reason=str(error))
        raise
    return audit("import", "done", ref, config, reason=f"from {origin}, signed by key {key.id}")


def _require_whole(image: Image, config: Config, progress: OnProgress) -> None:
    try:
        problems = verify(image.path, progress, encryption_key=config.encryption_key)
    except (Refused, CheckpointInvalid, OSError) as error:
        raise Failure(f"the image cannot be compared with its manifest: {error}", state=NOTHING) from error
    if problems:
        raise Failure(
            f"the image is not what its signed manifest lists: {listed(problems)}",
            state=NOTHING,
            advice="push it again where it is whole",
        )


def _place(directory: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise Failure(f"{target} exists", state=NOTHING, advice="give another name, or remove it")
    try:
        make_private(target.parent)
        directory.rename(target)
        sync(target.parent)
    except OSError as error:
        raise Failure(f"{target} cannot be written: {error}", state=NOTHING) from error
