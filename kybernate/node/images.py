"""The checkpoint images of this node: what lies below the checkpoint root and the trusted roots, and which are usable.

A pod's image lies at `checkpoint_root/<namespace>/<name>`; an image of a container without a pod at
`checkpoint_root/<name>`. Below a trusted root, the path says nothing about the namespace.

The directories may hold anything: no link is followed, nothing but manifests is opened, the number of entries is
limited, and an image that cannot be read is an entry of the list like any other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from kybernate.node.failure import Refused
from kybernate.node.naming import Names, meant
from kybernate.node.trusted import Openness, Signed, known_keys, openness_of, ring_of, signature_of, weak_files
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME, Source
from kybernate_shim.checkpoint.image.store import (
    CheckpointInvalid,
    CheckpointNotFound,
    Image,
    read_image,
    read_manifest,
)
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import KeyRing

State = Literal[
    "wrong namespace",
    "unsigned",
    "foreign",
    "weak digests",
    "open to others",
    "damaged",
    "no permission",
    "unfinished",
]
STAGING = ".import-"  # begins the name of a directory that an import fills
DEPTH = 8  # components of an image's name below its root, as in checkpoint/image/locate.py
MOST_ENTRIES = 200_000  # of all directories above images together
HARMLESS: tuple[State, ...] = ("open to others",)  # unless others can change the image, see `usable`


@dataclass(frozen=True)
class ImagePlace:
    """A directory that may hold an image. `name` is its path below `root`, `trusted` says of which kind that is."""

    root: Path
    name: str
    trusted: bool = False

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def namespace(self) -> str:
        """The Kubernetes namespace that the path stands for, "" for none."""
        first, slash, _ = self.name.partition("/")
        return first if slash and not self.trusted else ""


@dataclass(frozen=True)
class ListedImage:
    """An image, or what is left of one: then `image` and `signed` are None. `reason` explains the first state."""

    place: ImagePlace
    image: Image | None
    signed: Signed | None
    openness: Openness
    states: tuple[State, ...]
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether it can be restored: by pods of its namespace, or by `kybernate restore` where it has none."""
        return not self.openness.changeable and all(state in HARMLESS for state in self.states)

    @property
    def namespace(self) -> str:
        """The namespace that the manifest names, and else the one of the directory."""
        return self.source.namespace if self.image else self.place.namespace

    @property
    def name(self) -> str:
        """The name by which pods of the namespace restore it; an absolute path below a trusted root."""
        if self.place.trusted:
            return str(self.place.path)
        return self.place.name.removeprefix(f"{self.place.namespace}/") if self.place.namespace else self.place.name

    @property
    def source(self) -> Source:
        return self.image.manifest.source if self.image else Source("")

    @property
    def bytes(self) -> int:
        return self.image.manifest.bytes if self.image else 0

    @property
    def time(self) -> datetime | None:
        return datetime.fromisoformat(self.image.manifest.time) if self.image else None


@dataclass(frozen=True)
class Inventory:
    """All images, by namespace and name. `truncated`: there were too many entries to look at all of them."""

    images: tuple[ListedImage, ...]
    truncated: bool = False


def inventory(config: Config) -> Inventory:
    """Return all images of the node. Raises Refused."""
    ring = ring_of(known_keys(config))
    search = find_places(config)
    found = [judged(place, ring) for place in search.places]
    ordered = sorted(found, key=lambda one: (one.namespace, one.name, one.place.path))
    return Inventory(tuple(ordered), search.truncated)


@dataclass(frozen=True)
class FoundPlaces:
    """The directories that may hold images. `unreadable` are directories that could not be looked into, and why."""

    places: tuple[ImagePlace, ...]
    truncated: bool
    unreadable: dict[Path, str]


def find_places(config: Config) -> FoundPlaces:
    """Return the directories of the node that may hold images. Raises Refused."""
    search = _Search()
    found: dict[Path, ImagePlace] = {}
    for root, trusted in config.image_roots:
        for place in search.places(root, trusted=trusted):
            if place.path != config.gpu.image_pool:
                found.setdefault(place.path, place)
    return FoundPlaces(tuple(found.values()), search.truncated, search.unreadable)


def places_below(root: Path) -> list[Path]:
    """Return the directories with a manifest below a root of images. Raises Refused."""
    found = (place.path for place in _Search().places(root, trusted=False))
    return [path for path in found if not path.name.startswith(STAGING) and os.path.lexists(path / NAME)]


def places_called(name: str, config: Config) -> list[Path]:
    """Return the images whose directories have a name: below the roots, and below each namespace's directory there.

    What lies in memory comes after what lies on the disk. A path means itself.
    """
    if name.startswith("/"):
        return [Path(name)] if os.path.lexists(Path(name) / NAME) else []
    if not IMAGE_NAME.fullmatch(name):
        return []
    found: dict[Path, None] = {}
    for root, trusted in config.image_roots:
        if not trusted:
            places = (root / name, *(Path(entry.path, name) for entry in _directories(root)))
            found |= dict.fromkeys(place for place in places if os.path.lexists(place / NAME))
    return list(found)


def places_of_id(id: str, config: Config) -> list[Path]:
    """Return the images whose manifests have an id, or one that begins like it; what cannot be read is left out.

    Raises Refused.
    """
    found: list[tuple[Path, str]] = []
    for place in find_places(config).places:
        try:
            found.append((place.path, read_manifest(place.path)[0].id))
        except (CheckpointNotFound, CheckpointInvalid, OSError):
            continue
    return [path for path, _ in meant(id, found, lambda one: Names("", one[1], frozenset()))]


class _Search:
    """Finds directories with images, and directories in which a checkpoint or an import was not finished."""

    def __init__(self) -> None:
        self._left = MOST_ENTRIES
        self.truncated = False
        self.unreadable: dict[Path, str] = {}

    def places(self, root: Path, *, trusted: bool) -> Iterator[ImagePlace]:
        try:
            yield from self._below(root, "", trusted=trusted)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(f"{root} cannot be examined: {error.strerror}", advice="run as root") from error

    def _below(self, root: Path, name: str, *, trusted: bool) -> Iterator[ImagePlace]:
        directories, files = self._entries(root / name)
        if not directories and files and name:
            yield ImagePlace(root, name, trusted)  # no manifest, but files
            return
        for entry in directories:
            if entry.startswith(".") and not entry.startswith(STAGING):
                continue
            inner = f"{name}/{entry}" if name else entry
            if os.path.lexists(root / inner / NAME) or entry.startswith(STAGING):
                yield ImagePlace(root, inner, trusted)
            elif inner.count("/") + 1 < DEPTH:
                yield from self._inside(root, inner, trusted=trusted)

    def _inside(self, root: Path, name: str, *, trusted: bool) -> Iterator[ImagePlace]:
        try:
            yield from self._below(root, name, trusted=trusted)
        except FileNotFoundError:
            return  # it was removed in the meantime
        except OSError as error:  # which does not hide the others
            self.unreadable[root / name] = error.strerror or str(error)

    def _entries(self, directory: Path) -> tuple[list[str], bool]:
        """Return the names of the directories in a directory, and whether there is any regular file."""
        directories, files = [], False
        with os.scandir(directory) as entries:
            for entry in entries:
                if self._left == 0:
                    self.truncated = True
                    break
                self._left -= 1
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    files = True
        return sorted(directories), files


def _directories(root: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            yield from sorted(
                (entry for entry in entries if entry.is_dir(follow_symlinks=False)), key=lambda entry: entry.name
            )
    except OSError:
        return  # no directory of images, so no image of that name


def judged(place: ImagePlace, ring: KeyRing) -> ListedImage:
    """Read one image; whatever is wrong with it becomes its state."""
    try:
        _require_manifest(place.path / NAME)
        image = read_image(place.path)
        openness = openness_of(place.path, image.manifest)
    except (CheckpointNotFound, FileNotFoundError) as error:
        return ListedImage(place, None, None, Openness(), ("unfinished",), str(error))
    except (CheckpointInvalid, OSError, ValueError, RecursionError) as error:
        state: State = "no permission" if is_denied(error) else "damaged"
        return ListedImage(place, None, None, Openness(), (state,), str(error))
    signed = signature_of(image, ring)
    found = dict(_states(place, image, signed, openness))
    return ListedImage(place, image, signed, openness, tuple(found), next(iter(found.values()), ""))


def is_denied(error: BaseException) -> bool:
    """Return whether an image cannot be read because this user may not, which says nothing about the image."""
    return isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)


def _require_manifest(path: Path) -> None:
    """Refuse what would block its reader or fill the memory, before it is opened."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointInvalid(f"{path}: not a regular file")
    if status.st_size > MOST_BYTES:
        raise CheckpointInvalid(f"{path}: {status.st_size} bytes, at most {MOST_BYTES} are accepted")


def _states(place: ImagePlace, image: Image, signed: Signed, openness: Openness) -> Iterator[tuple[State, str]]:
    source = image.manifest.source
    if signed.fault:
        yield ("unsigned" if signed.fault == "unsigned" else "foreign"), signed.reason
    if not place.trusted and source.pod and not place.namespace:
        yield "wrong namespace", f"pods of namespace {source.namespace} look below {place.root / source.namespace}"
    elif place.namespace and source.pod and place.namespace != source.namespace:
        yield (
            "wrong namespace",
            f"it is an image of namespace {source.namespace}, and lies in the directory of {place.namespace}",
        )
    if signed.key is not None and signed.key.shared and (weak := weak_files(image.manifest)):
        yield (
            "weak digests",
            f"{len(weak)} files, {weak[0]} among them, have digests that detect damage but not forgery",
        )
    if openness.readable:
        yield "open to others", openness.reason
