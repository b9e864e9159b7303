"""Where checkpoint images are: below the node's checkpoint root, where every Kubernetes namespace has its directory.

A new image of a pod goes to `checkpoint_root/<namespace>/<name>`, where pods of the namespace name it, as the shim has
it (task/checkpointing.place_of). One of a container without a pod goes to `checkpoint_root/<name>`. An image is found
by its name, by `<namespace>/<name>`, or by its path.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure, NoImage, Refused
from kybernate.node.images import places_called, places_of_id
from kybernate.node.lookup import KnownContainer, short_id
from kybernate.node.naming import SHORTEST_ID, the_only
from kybernate_shim import errors
from kybernate_shim.checkpoint.image.copies import root_of
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.locate import namespace_root
from kybernate_shim.checkpoint.image.manifest import NAME as IMAGE
from kybernate_shim.checkpoint.image.store import (
    CheckpointInvalid,
    CheckpointNotFound,
    Image,
    read_for_restore,
    read_image,
)
from kybernate_shim.config import Config

ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BEGIN_OF_ID: Final = re.compile(rf"[0-9a-f-]{{{SHORTEST_ID},36}}")


PLACE_TAKEN_ADVICE: Final = "name another place, or remove it"


def locate(name: str) -> Path:
    """Return the directory that `name` means, whether it exists or not. Raises Ambiguous.

    Of an image that is on the disk and in memory under one name, it is the one on the disk.
    """
    config = Config.load()
    path = Path(name).absolute()
    if not IMAGE_NAME.fullmatch(name):
        return path if "/" in name else config.checkpoint_root / name
    found = places_called(name, config)
    if ID.fullmatch(name) if found else BEGIN_OF_ID.fullmatch(name):
        found += places_of_id(name, config)
    if "/" in name and os.path.lexists(path / IMAGE):  # below the working directory
        found.append(path)
    if found:
        return Path(the_only(name, list(map(str, _once(found, config)))))
    if "/" not in name:
        return config.checkpoint_root / name
    unfinished = (path, *(root / name for root, trusted in config.image_roots if not trusted))
    return next((one for one in unfinished if os.path.lexists(one)), path)


def _once(found: Iterable[Path], config: Config) -> list[Path]:
    """Return the images; one that lies on the disk and in memory once, where it lies on the disk."""
    by_name: dict[Path, Path] = {}
    memory = config.memory_root
    for path in sorted(found, key=lambda one: memory is not None and one.is_relative_to(memory)):
        in_memory = memory is not None and path.is_relative_to(memory)
        by_name.setdefault(config.checkpoint_root / path.relative_to(memory) if in_memory and memory else path, path)
    return list(by_name.values())


def nearest(image: Path) -> Path:
    """Return the directory to read an image from: its copy in memory, where there is one."""
    config = Config.load()
    if not image.is_relative_to(config.checkpoint_root):
        return image
    name = str(image.relative_to(config.checkpoint_root))
    return root_of(name, config) / name


def open_image(name: str, *, near: bool = False, arriving: bool = False) -> Image:
    """Return the checkpoint image that `name` means, all of whose files are there. Raises Failure.

    With `near`, it is the copy in memory where there is one; with `arriving`, for a restore alone, files with VRAM may
    still be arriving.
    """
    place = locate(name)
    read = read_for_restore if arriving else read_image
    try:
        return read(nearest(place) if near else place)
    except CheckpointNotFound as error:
        raise unfound(name, error) from error
    except CheckpointInvalid as error:
        raise unusable(error) from error


def unusable(error: CheckpointInvalid) -> Failure:
    """Say that an image is damaged, or that this user may not read it, which says nothing about the image."""
    if isinstance(error.__cause__, PermissionError):
        return Failure(f"no permission to read the checkpoint image: {error}", advice="run as root")
    return Failure(f"damaged checkpoint image: {error}", advice="it cannot be restored; make a new one")


def unfound(name: str, error: CheckpointNotFound) -> NoImage:
    """Say that there is no image, and where it was searched for."""
    here = "/" not in name and os.path.isdir(name)  # noqa: PTH112  # no word is too long for it
    return NoImage(f"no checkpoint image: {error}", advice=f"did you mean ./{name}?" if here else "")


def new_place(container: KnownContainer, name: str | None) -> Path:
    """Return the directory for a new image of `container`. Raises Refused."""
    name = name or f"{short_name(container)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    place = Path(name).absolute() if "/" in name else _root_of(container) / name
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise Refused(
            f"{place} exists and is not an empty directory", state="no checkpoint was made", advice=PLACE_TAKEN_ADVICE
        )
    return place


def _root_of(container: KnownContainer) -> Path:
    config = Config.load()
    if not container.pod:
        return config.checkpoint_root
    try:
        return namespace_root(config, container.pod_namespace)
    except errors.Refused as error:
        raise Refused(f"{container.title}: {error}", advice="name a directory by its path") from error


def short_name(container: KnownContainer) -> str:
    if container.pod:
        return f"{container.pod}-{container.name}"
    return short_id(container.id)
