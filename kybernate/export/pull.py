"""An exported image into a directory of this node, and to its place, once it is known what it is worth.

A signature that is valid here, with digests that no forger can meet, makes the image usable as it is, encrypted or not.
Every other image is examined, shown, and signed by an administrator's consent: that is an import.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kybernate.export.errors import ArtefactOdd, NotPulled
from kybernate.export.sources import Source
from kybernate.export.unpack import Unpacking
from kybernate.node.audited import audit, image_ref
from kybernate.node.images import STAGING
from kybernate.node.trusted import known_keys, ring_of, signature_of, weak_files
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image, listed, read_image, verify
from kybernate_shim.config import Config
from kybernate_shim.errors import NoRoom, Refused
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.private_files import DIRECTORY_MODE
from kybernate_shim.trust.keys import Key, KeyUnusable
from kybernate_shim.trust.places import make_private

NOTHING = "nothing was kept"
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Fetched:
    """An image in a directory of its own. `name` is what it was called, "" for nothing usable; `digest` is OCI's."""

    image: Image
    name: str
    digest: str


class Fetching:
    """A hidden directory of this node for one image."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fill(self, source: Source, progress: Progress = lambda done, total: None) -> Fetched:
        """Fetch an image, of which nothing is trusted yet: its files are those of its manifest, by name and size.

        Raises ArtefactOdd, NotPulled, and what the source raises.
        """
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress(done, unpacking.total)

        unpacking = Unpacking(self._directory, count)
        try:
            origin = source.fill(unpacking)
            unpacking.finish()
            image = read_image(self._directory)
        except (OSError, NoRoom) as error:
            raise NotPulled(f"the image cannot be stored: {error}", state=NOTHING) from error
        except CheckpointInvalid as error:
            raise ArtefactOdd(str(error)) from error
        return Fetched(image, origin.name if IMAGE_NAME.fullmatch(origin.name) else "", origin.digest)


@contextmanager
def fetching(config: Config) -> Iterator[Fetching]:
    """Give a directory for an image, which may be moved away; it is removed afterwards. Raises NotPulled."""
    directory = config.checkpoint_root / f"{STAGING}{os.urandom(8).hex()}"
    try:
        make_private(config.checkpoint_root)
        directory.mkdir(mode=DIRECTORY_MODE)
    except (OSError, Refused) as error:
        raise NotPulled(f"{config.checkpoint_root} cannot be written: {error}", state=NOTHING) from error
    try:
        yield Fetching(directory)
    finally:
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
    image: Image, target: Path, key: Key, origin: str, config: Config, progress: Progress = lambda done, total: None
) -> str:
    """Compare every byte of a fetched image with its manifest, and move it to `target`, unchanged.

    Return why the audit log has no line of it, "" if it has one. Raises NotPulled; the image is removed then.
    """
    ref = image_ref(target, image.manifest, image.digest)
    try:
        _require_whole(image, config, progress)
        _place(image.path, target)
    except NotPulled as error:
        audit("import", "failed", ref, config, reason=str(error))
        raise
    return audit("import", "done", ref, config, reason=f"from {origin}, signed by key {key.id}")


def _require_whole(image: Image, config: Config, progress: Progress) -> None:
    try:
        problems = verify(image.path, progress, encryption_key=config.encryption_key)
    except (KeyUnusable, CheckpointInvalid, OSError) as error:
        raise NotPulled(f"the image cannot be compared with its manifest: {error}", state=NOTHING) from error
    if problems:
        raise NotPulled(
            f"the image is not what its signed manifest lists: {listed(problems)}",
            state=NOTHING,
            advice="push it again where it is whole",
        )


def _place(directory: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise NotPulled(f"{target} exists", state=NOTHING, advice="give another name, or remove it")
    try:
        make_private(target.parent)
        directory.rename(target)
        sync(target.parent)
    except OSError as error:
        raise NotPulled(f"{target} cannot be written: {error}", state=NOTHING) from error
