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
from kybernate.node.lookup import KnownContainer, short_id
from kybernate_shim.checkpoint.image.copies import root_of
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.locate import ImageForbidden, namespace_root
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, Image, read_image
from kybernate_shim.config import Config


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
        path = Path(name).absolute()
        if os.path.lexists(path) or not IMAGE_NAME.fullmatch(name):
            return path
        below = (root / name for root, trusted in config.image_roots if not trusted)
        return next((place for place in below if place.is_dir()), path)
    found = named(name, config) if IMAGE_NAME.fullmatch(name) else []
    if len(found) > 1:
        roots = [root for root, _ in config.image_roots]
        listed = "\n".join(
            f"  {place.relative_to(root)}" for place in found for root in roots if place.is_relative_to(root)
        )
        raise ImageAmbiguous(f"{name!r} is the name of {len(found)} checkpoint images:\n{listed}")
    return found[0] if found else config.checkpoint_root / name


def nearest(image: Path) -> Path:
    """Return the directory to read an image from: its copy in memory, where there is one."""
    config = Config.load()
    if not image.is_relative_to(config.checkpoint_root):
        return image
    name = str(image.relative_to(config.checkpoint_root))
    return root_of(name, config) / name


def open_image(name: str, *, near: bool = False) -> Image:
    """Return the checkpoint image that `name` means, all of whose files are there. Raises ImageUnusable.

    With `near`, it is the copy in memory where there is one.
    """
    place = locate(name)
    try:
        return read_image(nearest(place) if near else place)
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


def new_place(container: KnownContainer, name: str | None) -> Path:
    """Return the directory for a new image of `container`. Raises PlaceTaken."""
    name = name or f"{short_name(container)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    place = Path(name).absolute() if "/" in name else _root_of(container) / name
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise PlaceTaken(f"{place} exists and is not an empty directory", state="no checkpoint was made")
    return place


def _root_of(container: KnownContainer) -> Path:
    config = Config.load()
    if not container.pod:
        return config.checkpoint_root
    try:
        return namespace_root(config, container.pod_namespace)
    except ImageForbidden as error:
        raise PlaceTaken(f"{container.title}: {error}", advice="name a directory by its path") from error


def short_name(container: KnownContainer) -> str:
    if container.pod:
        return f"{container.pod}-{container.name}"
    return short_id(container.id)
