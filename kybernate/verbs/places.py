"""How the images and places that a request names are found on the node, and what an operation holds of them. Blocks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kybernate.node.failure import Invalid, NoImage
from kybernate.node.filesystem import nearest_existing
from kybernate.node.places import locate
from kybernate.verbs.model import DISK, Target
from kybernate.verbs.node import Node
from kybernate_shim.checkpoint.image.manifest import ARRIVING, NAME

IMAGE_NOT_FOUND_ADVICE: Final = "`kybernate images` lists what there is"


def image_here(node: Node, name: str, *, arriving: bool = False) -> Path:
    """Return the directory of an image that exists; with `arriving`, also of one whose VRAM is still arriving.

    Raises NoImage and Ambiguous.
    """
    name = absolute(name) if name.startswith("/") else name
    path = node.image_of(name) or locate(name)
    if not any(os.path.lexists(path / manifest) for manifest in (NAME, *((ARRIVING,) if arriving else ()))):
        raise NoImage(
            f"no checkpoint image: {path} has no {NAME}",
            state="no operation was started",
            advice=IMAGE_NOT_FOUND_ADVICE,
        )
    return path


def between_tiers(node: Node, wanted: Any) -> Target:
    """Return the target of what moves an image. It takes no turn at a disk: movements have an order of their own."""
    if wanted.tier not in node.tiers():
        names = ", ".join(node.tiers())
        raise Invalid(f"{wanted.tier!r} is not a tier of this node: {names}", state="no operation was started")
    namespace, name, id = ref = node.ref_of(wanted)
    return Target(image=id, title=f"{namespace}/{name}" if namespace else name, ref=ref, holds=(f"image {id}",))


def with_place(target: Target, *, writes: Path, image: Path | None = None) -> Target:
    """Return the target with a place that is written."""
    return replace(
        target,
        image=str(image) if image else target.image,
        writes=str(writes),
        holds=(*target.holds, held(writes)),
        copies=tuple(dict.fromkeys((*target.copies, disk_of(writes)))),
    )


def absolute(path: str) -> str:
    """Return a path as it is held. Raises Invalid for one that is relative or has `..`."""
    if not path.startswith("/") or ".." in Path(path).parts:
        raise Invalid(f"{path!r} is not an absolute path without `..`", state="no operation was started")
    return str(Path(path))


def held(path: Path) -> str:
    """Return the name by which an operation holds or shares a path."""
    return f"path {path}"


def disk_of(path: Path) -> str:
    """Return the name of the filesystem of `path`, or of where it will be."""
    device = nearest_existing(path).stat().st_dev
    return f"{DISK}{os.major(device)}:{os.minor(device)}"
