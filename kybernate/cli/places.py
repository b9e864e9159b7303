"""Where checkpoint images are: a name without a slash is one of the node's checkpoint root, all else is a path.

The same rule as for the annotation `kybernate.io/restore-from`, so that one name works everywhere.
"""

from __future__ import annotations

import time
from pathlib import Path

from kybernate.node.failure import Failure
from kybernate.node.lookup import Container
from kybernate_shim.checkpoint.image import CheckpointInvalid, CheckpointNotFound, Image, read_image
from kybernate_shim.config import Config

ID_LENGTH = 12  # of an id of 64 digits; enough to tell containers apart


class ImageUnusable(Failure):
    """There is no checkpoint image at the place, or it is damaged."""


class PlaceTaken(Failure):
    """Something is where the new image was to be."""

    advice = "name another place, or remove it"


def locate(name: str) -> Path:
    """Return the directory that `name` means, whether it exists or not."""
    return Path(name).absolute() if "/" in name else Config.load().checkpoint_root / name


def open_image(name: str) -> Image:
    """Return the checkpoint image that `name` means, all of whose files are there. Raises ImageUnusable."""
    try:
        return read_image(locate(name))
    except CheckpointNotFound as error:
        raise unfound(name, error) from error
    except CheckpointInvalid as error:
        raise ImageUnusable(
            f"damaged checkpoint image: {error}", advice="it cannot be restored; make a new one"
        ) from error


def unfound(name: str, error: CheckpointNotFound) -> ImageUnusable:
    """Say that there is no image, and where it was looked for."""
    here = "/" not in name and Path(name).is_dir()
    return ImageUnusable(f"no checkpoint image: {error}", advice=f"did you mean ./{name}?" if here else "")


def new_place(container: Container, name: str | None) -> Path:
    """Return the directory for a new image of `container`. Raises PlaceTaken."""
    place = locate(name) if name else locate(f"{_short(container)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise PlaceTaken(f"{place} exists and is not an empty directory", state="no checkpoint was made")
    return place


def _short(container: Container) -> str:
    if container.pod:
        return f"{container.pod}-{container.name}"
    return container.id[:ID_LENGTH] if len(container.id) == 64 else container.id
