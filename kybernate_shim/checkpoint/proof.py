"""The proof that an image can be restored: CRIU's files against the filesystems that a restore will see.

CRIU names in its images what it will open, bind and mount. It has found all of it at the dump; but what it finds at the
restore is another container's: the layers of the container image, the changed files that were saved, the mounts of the
new container. Each kind of thing has one function here, which yields a sentence for everything of the kind that the
restore will not find. Only names are looked up, and the small files of the image read: what the files contain is for
digests to prove.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kybernate_shim.checkpoint.criu.images import DumpedMount, foreign_roots, mounts
from kybernate_shim.checkpoint.criu.opened import OpenedFiles, OpenedPath, ghost_file, opened
from kybernate_shim.checkpoint.names import Names
from kybernate_shim.messages import criu_pb2 as criu

CONTENT = ("tmpfs-dev-{device}.tar.gz.img", "tmpfs-{id}.tar.gz.img")  # CRIU's two names of a tmpfs' content


class Root(Protocol):
    """The root filesystem that a restore will see."""

    def lacks(self, path: str) -> str:
        """Return why there is no file of any kind at a path of the container, "" where there is one."""


class AnyRoot:
    """A root filesystem of which nothing is known."""

    def lacks(self, path: str) -> str:
        return ""


@dataclass(frozen=True)
class Unproven:
    """A sentence about something that a restore will not find, and the path of the container that it is about."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path!a} {self.why}"


@dataclass(frozen=True)
class ImageEvidence:
    """What the proof goes by. `mounts` are the image's by their ids, without the root.

    `names` are made before CRIU begins. `lost` are the destinations of mounts whose content will be different, with the
    reason. `foreign` are roots that programs have made for themselves: CRIU's own checks must do for what is there.
    """

    directory: Path
    opened: OpenedFiles
    mounts: Mapping[int, DumpedMount]
    root: Root
    names: Names = field(default_factory=Names)
    lost: Mapping[str, str] = field(default_factory=dict)
    foreign: Collection[int] = ()

    def lacks(self, place: OpenedPath) -> str:
        """Return why the restore will not have what is at a path, "" where it will or where the node alone knows."""
        mount = self.mounts.get(place.mount)
        if place.mount in self.foreign:
            return ""
        if mount is None:
            return self.root.lacks(place.path)
        return self.lost.get(mount.destination, "") if mount.key else ""


def evidence(
    directory: Path, root: Root, names: Names | None = None, lost: Mapping[str, str] | None = None
) -> ImageEvidence:
    """Read what the CRIU images in `directory` name. Raises Damaged."""
    by_id = {mount.id: mount for mount in mounts(directory)}
    foreign = foreign_roots(directory)
    return ImageEvidence(directory, opened(directory), by_id, root, names or Names(), lost or {}, foreign)


def unproven(found: ImageEvidence) -> list[Unproven]:
    """Return everything that a restore would not find, none where the image is proven."""
    kinds = (_files, _removed, _references, _sockets, _contents)
    return list(dict.fromkeys(one for kind in kinds for one in kind(found)))


def _files(found: ImageEvidence) -> Iterator[Unproven]:
    """Regular files, directories, devices and FIFOs, by the names under which they are open."""
    elsewhere = {remap.file for remap in found.opened.remaps} | {remap.target for remap in found.opened.remaps}
    for number, place in found.opened.paths.items():
        if number not in elsewhere and (why := found.lacks(place)):
            yield Unproven(place.path, f"is open, and {why}")


def _removed(found: ImageEvidence) -> Iterator[Unproven]:
    """Files whose names are gone: a copy in the image, or a link of CRIU's to another name."""
    links = {name.path: name.other for name in found.names.links}
    for remap in found.opened.remaps:
        place = found.opened.paths.get(remap.file)
        if place is None:
            yield Unproven(f"file {remap.file:#x}", "was removed, and is not in CRIU's list of files")
        elif remap.kind == criu.Remap.GHOST:
            if not ghost_file(found.directory, remap.target).exists():
                yield Unproven(place.path, "was removed while it was open, and its content is not in the image")
        elif remap.kind == criu.Remap.LINKED:
            yield from _linked(found, place, found.opened.paths.get(remap.target), links)


def _linked(
    found: ImageEvidence, place: OpenedPath, link: OpenedPath | None, links: Mapping[str, str]
) -> Iterator[Unproven]:
    mount = found.mounts.get(place.mount)
    if mount is not None and not mount.key:
        return  # its content is in the image, with CRIU's link
    if link is None or link.path not in links:
        if link is None or found.root.lacks(link.path) or mount is not None:
            yield Unproven(place.path, "was removed while it was open, and its other name is not in the image")
    elif why := found.lacks(OpenedPath(links[link.path], place.mount)):
        yield Unproven(links[link.path], f"is open under the name {place.path!a}, which was removed, and {why}")


def _references(found: ImageEvidence) -> Iterator[Unproven]:
    """What a process executes, and its directories: they must be files with a path."""
    for what, number in found.opened.needed:
        if number not in found.opened.paths:
            yield Unproven(what, "is not a file with a path, such as a program that was executed from memory")


def _sockets(found: ImageEvidence) -> Iterator[Unproven]:
    """UNIX sockets: the directory of each path must be there, or be made for the moment."""
    made = {name.path for name in found.names.sockets if name.missing}
    for socket in found.opened.sockets:
        directory = str(Path(socket.path).parent)
        if socket.path not in made and (why := found.lacks(OpenedPath(directory, socket.mount))):
            yield Unproven(socket.path, f"has a UNIX socket bound to it, and its directory {why}")


def _contents(found: ImageEvidence) -> Iterator[Unproven]:
    """Filesystems in memory that are the container's own: their content must be in the image."""
    seen: Collection[int] = set()
    for mount in found.mounts.values():
        if mount.type != "tmpfs" or mount.key or mount.device in seen:
            continue
        seen = {*seen, mount.device}
        files = (found.directory / name.format(device=mount.device, id=mount.id) for name in CONTENT)
        if not any(file.exists() for file in files):
            yield Unproven(mount.destination, "is a filesystem in memory, and its content is not in the image")
