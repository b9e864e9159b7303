"""Where checkpoint images are: below the node's checkpoint root, where every Kubernetes namespace has its directory.

A new image of a pod goes to `checkpoint_root/<namespace>/<name>`, where pods of the namespace name it, as the shim has
it (task/checkpointing.place_of). One of a container without a pod goes to `checkpoint_root/<name>`. An image is found
by its name, by `<namespace>/<name>`, or by its path.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kybernate.node.failure import Failure
from kybernate.node.images import named
from kybernate.node.lookup import Container
from kybernate_shim.checkpoint.image import CheckpointInvalid, CheckpointNotFound, Image, read_image
from kybernate_shim.checkpoint.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.locate import ImageForbidden, namespace_root
from kybernate_shim.config import Config

ID_LENGTH = 12  # of an id of 64 digits; enough to tell containers apart


class ImageUnusable(Failure):
    """There is no checkpoint image at the place, or it is damaged."""


class PlaceTaken(Failure):
    """Something is where the new image was to be."""

    advice = "name another place, or remove it"


class ImageAmbiguous(Failure):
    """Images of several namespaces have the name; the message lists them."""

    advice = "name it as NAMESPACE/NAME"


def locate(name: str) -> Path:
    """Return the directory that `name` means, whether it exists or not. Raises ImageAmbiguous."""
    config = Config.load()
    if "/" in name:
        path, below = Path(name).absolute(), config.checkpoint_root / name
        return below if not os.path.lexists(path) and IMAGE_NAME.fullmatch(name) and below.is_dir() else path
    found = named(name, config) if IMAGE_NAME.fullmatch(name) else []
    if len(found) > 1:
        listed = "\n".join(f"  {place.relative_to(config.checkpoint_root)}" for place in found)
        raise ImageAmbiguous(f"{name!r} is the name of {len(found)} checkpoint images:\n{listed}")
    return found[0] if found else config.checkpoint_root / name


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
    name = name or f"{_short(container)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    place = Path(name).absolute() if "/" in name else _root_of(container) / name
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise PlaceTaken(f"{place} exists and is not an empty directory", state="no checkpoint was made")
    return place


def _root_of(container: Container) -> Path:
    config = Config.load()
    if not container.pod:
        return config.checkpoint_root
    try:
        return namespace_root(config, container.pod_namespace)
    except ImageForbidden as error:
        raise PlaceTaken(f"{container.title}: {error}", advice="name a directory by its path") from error


def _short(container: Container) -> str:
    if container.pod:
        return f"{container.pod}-{container.name}"
    return container.id[:ID_LENGTH] if len(container.id) == 64 else container.id
