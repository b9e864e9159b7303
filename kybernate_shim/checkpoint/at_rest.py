"""The proof that an image can be restored, made from an image on a disk alone.

What the layers of the container image have is not known then: what is neither among the changed files nor deleted by
them is taken to be in a layer.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kybernate_shim.checkpoint import names
from kybernate_shim.checkpoint.image.manifest import SAVED_SPEC, Manifest
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Problem
from kybernate_shim.checkpoint.proof import AnyRoot, Root, evidence, unproven
from kybernate_shim.checkpoint.rootfs.apply import MOST_ENTRIES, Headers
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.checkpoint.rootfs.diff import OPAQUE, WHITEOUT
from kybernate_shim.checkpoint.tar_entry import Entry
from kybernate_shim.checkpoint.tree_tar import ENCODING
from kybernate_shim.checkpoint.volumes.places import lost
from kybernate_shim.errors import Damaged, Invalid
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.oci.spec import Spec

KIND: Final = "not restorable"
NOWHERE: Final = "rootfs"  # no image has a directory


@dataclass(frozen=True)
class DiffRoot:
    """The root filesystem that a restore makes of unknown layers and a diff: what the diff has and what it deletes."""

    there: Collection[str]
    deleted: Collection[str]

    def lacks(self, path: str) -> str:
        if path in self.there:
            return ""
        above = [path, *map(str, PurePosixPath(path).parents)]
        return "was deleted, by the changed files of the image" if set(above) & set(self.deleted) else ""


def unrestorable(directory: Path, manifest: Manifest) -> list[Problem]:
    """Return what a restore of an intact image would not find; of an encrypted image, nothing is known."""
    if manifest.encryption is not None:
        return []
    listed = {file.name for file in manifest.files}
    try:
        known = names.read(directory) if names.FILE in listed else names.Names()
        elsewhere = _lost(directory, manifest) if SAVED_SPEC in listed else {}
        found = evidence(directory, AnyRoot(), known, elsewhere)
        if ROOTFS_DIFF in listed:
            wanted = {place.path for place in (*found.opened.paths.values(), *found.opened.sockets)}
            wanted |= {name.other for name in known.links}
            found = evidence(directory, _root_of(directory / ROOTFS_DIFF, wanted), known, elsewhere)
        return [Problem("files.img", KIND, str(one)) for one in unproven(found)]
    except (Damaged, CheckpointInvalid) as error:
        return [Problem("files.img", KIND, str(error))]
    except Invalid as error:
        return [Problem(SAVED_SPEC, KIND, str(error))]


def _lost(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Return the mounts of the pod's own volumes whose content is not in the image. Raises Invalid.

    Destinations are those of the dumped container, whose root filesystem is not here for the links on their way.
    """
    spec = Spec.read(directory, SAVED_SPEC)
    return lost(spec, directory / NOWHERE, {volume.name for volume in manifest.volumes})


def _root_of(tar: Path, wanted: Collection[str]) -> Root:
    """Read what a diff has of the paths that are `wanted`, and of what is above them. Raises Damaged."""
    interesting = {str(place) for path in wanted for place in (PurePosixPath(path), *PurePosixPath(path).parents)}
    there: set[str] = set()
    deleted: set[str] = set()
    try:
        with (
            Headers(open_plain(tar)) as headers,
            tarfile.open(fileobj=headers, mode="r:", encoding=ENCODING, tarinfo=Entry) as archive,
        ):
            for number, info in enumerate(archive):
                if number >= MOST_ENTRIES:
                    raise Damaged(f"{tar}: more than {MOST_ENTRIES} entries")
                headers.next_entry()
                archive.members = []  # type: ignore[attr-defined]  # it would keep every entry in memory
                place = PurePosixPath("/", info.name)
                if place.name == OPAQUE:
                    deleted |= {path for path in interesting if PurePosixPath(path).parent == place.parent} - there
                elif place.name.startswith(WHITEOUT):
                    deleted |= {str(place.with_name(place.name.removeprefix(WHITEOUT)))} & interesting
                elif str(place) in interesting:
                    there.add(str(place))
                    deleted.discard(str(place))
    except (tarfile.TarError, OSError, ValueError, EOFError, RecursionError) as error:
        raise Damaged(f"{tar}: {error}") from error
    return DiffRoot(there, deleted - there)
