"""The images of one Kubernetes namespace on this node, as far as a container may be restored from them by itself."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from kybernate_shim.checkpoint.image import manifest as manifests
from kybernate_shim.checkpoint.image.locate import NAME, NAMESPACE
from kybernate_shim.checkpoint.image.manifest import ManifestInvalid
from kybernate_shim.checkpoint.image.starts import KnownImage
from kybernate_shim.config import Config
from kybernate_shim.linux.plain_files import read_plain


def images_of(namespace: str, mentioning: Collection[str], config: Config) -> tuple[KnownImage, ...]:
    """Return the whole images of a namespace whose manifests have one of the texts as a value; blocks.

    What cannot be read is left out: a restore that names it says what is wrong with it. The text is looked for before
    a manifest is parsed, since a namespace may have thousands.
    """
    marks = [f'"{text}"'.encode() for text in mentioning if text]
    found: dict[str, KnownImage] = {}
    for directory in _directories(namespace, config):
        for name in _names(directory):
            with suppress(OSError, ManifestInvalid):
                content = read_plain(directory / name / manifests.NAME, most=manifests.MOST_BYTES)
                if not any(mark in content for mark in marks):
                    continue
                manifest = manifests.decode(content)
                if manifest.source.namespace == namespace:
                    found.setdefault(name, KnownImage.of(name, manifest))
    return tuple(found.values())


def origin_of(namespace: str, name: str, config: Config) -> str:
    """Return the origin of the image of that name, "" where there is none that can be read; blocks."""
    if not NAME.fullmatch(name):
        return ""
    for directory in _directories(namespace, config):
        with suppress(OSError, ManifestInvalid):
            content = read_plain(directory / name / manifests.NAME, most=manifests.MOST_BYTES)
            return manifests.decode(content).origin
    return ""


def _directories(namespace: str, config: Config) -> list[Path]:
    """Return where images of the namespace lie; nowhere, where that is not the name of one: a pod states its own."""
    if not NAMESPACE.fullmatch(namespace):
        return []
    return [root / namespace for root in (config.checkpoint_root, config.memory_root) if root is not None]


def _names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            yield from (entry.name for entry in entries if NAME.fullmatch(entry.name))
    except OSError:
        return
