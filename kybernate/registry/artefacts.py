"""Reads what lies below a node's places of images into rows of the registry, which is an index of it.

An image that is damaged is a row like any other, with what its manifest still says. A directory without a manifest is
none, because a checkpoint may just be filling it, unless the registry's file there shows that there was an image.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Final

from kybernate.node.failure import Failure
from kybernate.node.images import FoundPlaces, ImagePlace, ListedImage, find_places, judged
from kybernate.node.reading import OnProgress
from kybernate.node.trusted import known_keys, ring_of
from kybernate.registry.beside import Beside, read
from kybernate.registry.model import Annotations, Gpu, ImageRow, Replica, ReplicaState, damaged_key
from kybernate_shim.checkpoint.image.manifest import NAME, REGISTRY, Manifest, Source, UsedGpu
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, Image, read_manifest
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import KeyRing
from kybernate_shim.vram_io.files import lies_in_memory

THREADS: Final = 8  # hide the latency of a disk; the interpreter runs one of them at a time
LABELS_LOST: Final = "labels unreadable"  # a finding: the registry's file of the image cannot be used
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Found:
    """An image as it lies on the node: a row with one replica, and with the annotations kept with it.

    `stamp` changes with the manifest and with the registry's file there.
    """

    row: ImageRow
    stamp: Stamp

    @property
    def replica(self) -> Replica:
        return self.row.replicas[0]

    @property
    def directory(self) -> Path:
        return Path(self.replica.place)


@dataclass(frozen=True)
class Scan:
    """All images of a node. What lies below `unreadable` directories is not known; the values say why."""

    found: tuple[Found, ...]
    unreadable: dict[Path, str]


class Artefacts:
    """The images of this node, below the checkpoint root and the trusted roots."""

    def __init__(self, config: Config, node: str = "") -> None:
        self._config = config
        self.node = node or this_node()

    def scan(self, progress: OnProgress = lambda done, total: None, *, threads: int = THREADS) -> Scan:
        """Look at all images; `progress` is called with the number of images, from this thread.

        Raises Refused and Failure for more directories than are looked at.
        """
        places = self._places()
        ring = self._ring
        found: list[Found] = []
        with ThreadPoolExecutor(threads, "registry") as pool:
            try:
                looks = pool.map(lambda place: self._look(place, ring), places.places)
                for done, one in enumerate(looks, 1):
                    found += [] if one is None else [one]
                    progress(done, len(places.places))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return Scan(tuple(found), places.unreadable)

    def look(self, directory: Path) -> Found | None:
        """Return the image in a directory as it is now, None where there is none. Raises Refused."""
        return self._look(self._place_of(directory), self._ring)

    def _places(self) -> FoundPlaces:
        found = find_places(self._config)
        if found.truncated:
            raise Failure(
                f"{self._config.checkpoint_root}: there are too many directories to look at all of them",
                state="nothing was changed",
                advice="remove what is not an image from below the roots",
            )
        return found

    @cached_property
    def _ring(self) -> KeyRing:
        return ring_of(known_keys(self._config))

    def _place_of(self, directory: Path) -> ImagePlace:
        for root, trusted in self._config.image_roots:
            if directory.is_relative_to(root) and directory != root:
                return ImagePlace(root, str(directory.relative_to(root)), trusted)
        return ImagePlace(directory.parent, directory.name, trusted=True)

    def _look(self, place: ImagePlace, ring: KeyRing) -> Found | None:
        stamp = stamp_of(place.path)  # before the content: what changes afterwards has another one
        listed = judged(place, ring)
        beside, fault = _beside(place.path)
        if listed.states == ("unfinished",) and beside is None:
            return None
        row = self._row(listed, beside)
        if beside is not None and row.id != beside.image:
            fault = f"{place.path / REGISTRY} is of image {beside.image}"
            row = self._row(listed, None)
        if fault:
            replica = row.replicas[0]
            findings = (*replica.findings, LABELS_LOST)
            row = replace(row, replicas=(replace(replica, findings=findings, reason=replica.reason or fault),))
        return Found(row, stamp)

    def _row(self, listed: ListedImage, beside: Beside | None) -> ImageRow:
        place = str(listed.place.path)
        image: Image | None = listed.image or _damaged_image(listed.place.path)
        key = image.digest if image else damaged_key(self.node, place)
        annotations = beside.annotations if beside else Annotations()
        known = described(image.manifest) if image else ImageRow("", beside.image if beside else "", None, Source(""))
        return replace(known, key=key, annotations=annotations, replicas=(self._replica(listed, image, beside),))

    def _replica(self, listed: ListedImage, image: Image | None, beside: Beside | None) -> Replica:
        damage = beside.damage if beside else ""
        state: ReplicaState = "damaged" if listed.image is None or damage else "complete"
        return Replica(
            self.node,
            str(listed.place.path),
            self._tier(listed.place.root),
            listed.name,
            state,
            sum(file.size for file in image.manifest.stored_files) if image else 0,
            beside.verified if beside else None,
            ("damaged",) if listed.image is None else (*listed.states, *(["damaged"] if damage else [])),
            listed.reason or damage,
            beside.annotations.revision if beside else 0,
        )

    def _tier(self, root: Path) -> str:
        known = self._tiers
        if root not in known:
            known[root] = "ram" if _in_memory(root) else "disk"
        return known[root]

    @cached_property
    def _tiers(self) -> dict[Path, str]:
        return {}


def this_node() -> str:
    """Return the name of this node, as manifests have it."""
    return os.uname().nodename


def stamp_of(directory: Path) -> Stamp:
    """Return what shows whether the manifest or the registry's file were replaced."""
    return tuple(_identity(directory / name) for name in (NAME, REGISTRY))


def unchanged(found: Sequence[Found]) -> list[bool]:
    """Return which of the images are as they were when they were read."""
    return [stamp_of(one.directory) == one.stamp for one in found]


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = path.lstat()
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def _beside(directory: Path) -> tuple[Beside | None, str]:
    try:
        return read(directory), ""
    except ValueError as error:
        return None, str(error)


def _damaged_image(directory: Path) -> Image | None:
    """Return what the manifest of a damaged image says, if that can be read."""
    try:
        manifest, content = read_manifest(directory)
    except (CheckpointNotFound, CheckpointInvalid, OSError, ValueError, RecursionError):
        return None
    return Image(directory, manifest, content=content)


def described(manifest: Manifest) -> ImageRow:
    """Return what a manifest says of its image, without key and replicas."""
    return ImageRow(
        "",
        manifest.id,
        datetime.fromisoformat(manifest.time),
        manifest.source,
        manifest.bytes,
        sum(process.bytes for process in manifest.cuda_processes),
        manifest.encryption is not None,
        tuple(map(_gpu, manifest.gpus)),
        lineage=replace(manifest.lineage, origin=manifest.origin),
    )


def _gpu(used: UsedGpu) -> Gpu:
    return Gpu(used.uuid, used.model, used.driver, sum(process.bytes for process in used.processes))


def _in_memory(root: Path) -> bool:
    try:
        return lies_in_memory(root)
    except OSError:
        return False
