"""Rows for tests: images that no disk holds, on object stores and other nodes, and directories that exist."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

from kybernate.registry.model import EPOCH, Annotations, Gpu, ImageRow, Replica
from kybernate_shim.checkpoint.image.manifest import Source

AGES = 1_700_000_000


def row(number: int, *, node: str = "node-b", tier: str = "disk", **changes: Any) -> ImageRow:
    """Return the image of that number: a second younger than the one before, on `node`."""
    name = f"image-{number}"
    image = ImageRow(
        f"sha256:{sha256(name.encode()).hexdigest()}",
        f"{number:08d}-0000",
        EPOCH + timedelta(seconds=AGES + number),
        Source(f"c{number}", "shop", f"web-{number % 3}", "app", "registry.local/app:1", "sha256:1", node),
        1000 + number,
        1 << 30,
        False,
        (Gpu("GPU-1", "NVIDIA H200", "580.1", 1 << 30),),
        Annotations(),
        (Replica(node, f"/images/shop/{name}", tier, name, "complete", 900 + number),),
    )
    return replace(image, **changes)


def labelled(number: int, labels: dict[str, str], **changes: Any) -> ImageRow:
    """Return an image with labels."""
    return row(number, annotations=Annotations(labels=labels), **changes)


def from_source(number: int, **source: str) -> ImageRow:
    """Return an image with another source."""
    image = row(number)
    return replace(image, source=replace(image.source, **source))
