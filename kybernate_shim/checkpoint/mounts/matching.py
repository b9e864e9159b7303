"""The mounts of an image against those of the new container, before anything is restored."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.criu.config import line
from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.image.manifest import ImageMount
from kybernate_shim.checkpoint.mounts.configured import NULL, SpecMounts
from kybernate_shim.checkpoint.mounts.hooks import is_kept
from kybernate_shim.checkpoint.mounts.paths import is_normal
from kybernate_shim.checkpoint.mounts.sources import followed
from kybernate_shim.linux.mount.mountinfo import MountPoint
from kybernate_shim.oci.spec import Spec, names_gpu

SHOWN_DIFFERENCES: Final = 20
SHOWN_PATH: Final = 200  # characters

KERNELS: Final = ("/proc", "/sys", "/dev")
PRIVATE: Final = ("tmpfs", "mqueue", "devpts", "overlay")  # nothing of the kernel's or the node's is in them


class MountUnmatched(Exception):
    """Mounts of the image and of the new container differ. `differences` are sentences, one for each mount."""

    def __init__(self, differences: Sequence[str]) -> None:
        shown = "; ".join(differences[:SHOWN_DIFFERENCES])
        more = len(differences) - SHOWN_DIFFERENCES
        super().__init__(
            f"{shown}{f'; and {more} more' if more > 0 else ''}. Nothing was restored; give the new container the"
            " mounts of the dumped one"
        )
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Matching:
    """What a restore must do about mounts beforehand.

    `lines` go into CRIU's configuration. `directories` and `files` are mount points that must exist in the root
    filesystem. `sources` are the node's paths of bind mounts, by the keys under which CRIU asks for them. `moved` are
    the destinations, by those in config.json, that are restored where the links of the dumped image led.
    """

    lines: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)


def external(key: str, source: str) -> str:
    """Return CRIU's line that makes a bind mount of the image from a path of the node."""
    return line("external", f"mnt[{key}]:{source}")


def match_mounts(
    dumped: Iterable[DumpedMount],
    recorded: Iterable[ImageMount],
    spec: Spec,
    rootfs: Path,
    *,
    policy: Sequence[str] = (),
    host: Sequence[MountPoint] = (),
    strict: bool = False,
    root_writable: bool = False,
) -> Matching:
    """Compare the mounts in CRIU's images with those of the new container, before anything is restored.

    `recorded` are the manifest's, which say where the mounts of hooks came from; only paths of the node that `policy`
    names, by patterns in which `*` stands for any text but /, are mounted so, and mounts of `host` that the new
    container sees anyway, below a recursive bind mount. `strict`: a filesystem of the kernel's,
    such as proc or sysfs, is restored only where config.json mounts it, and every mount, the root (`root_writable` in
    the image) included, writable only where it is writable there. Both may come from anywhere. Raises MountUnmatched,
    which names the differences.
    """
    dumped, recorded = list(dumped), list(recorded)
    moved = _moved(dumped, recorded)
    listed = SpecMounts.of(spec, rootfs, moved)
    sources = {mount.destination: followed(mount.source) for mount in recorded if mount.kind == "hook" and mount.source}
    # Their names are those of the dumped container's GPUs, and say nothing to its processes. The new one has others.
    gpus = {mount.destination: NULL for mount in recorded if mount.source == NULL and names_gpu(mount.destination)}
    differences: list[str] = []
    needed: dict[str, str] = {}
    for mount in dumped:
        if not is_normal(mount.destination):
            differences.append(f"{mount.destination[:SHOWN_PATH]!a} is not a path where a container can have a mount")
        elif not mount.key or listed.offers(mount.key):
            differences += _changed(mount, listed)
        elif mount.key in listed.binds:
            needed[mount.key] = listed.binds[mount.key]
        elif (source := sources.get(mount.destination, "")) and (
            (_permits(policy, source) and _exists(source)) or listed.shows(mount.destination, source, host)
        ):
            needed[mount.key] = source
        elif mount.destination in gpus:
            needed[mount.key] = NULL
        else:
            differences.append(_only_dumped(mount, source, policy))
        if strict:
            differences += _beyond(mount, listed)
    there = {mount.destination for mount in dumped}
    if strict and root_writable and (spec.document.get("root") or {}).get("readonly"):
        differences.append("/ is writable in the image and read-only in the new container's configuration")
    if strict:
        differences += [
            f"{path} is hidden or read-only in the new container's configuration, but was not in the dumped one"
            for path in sorted((listed.masked | listed.read_only) - there)
            if os.path.lexists(path)  # of the kernel's own, which runtimes leave out where the kernel has none
        ]
    differences += [
        f"{destination} is mounted in the new container, but was not in the dumped one"
        for destination in sorted(listed.destinations - there)
        if not (names_gpu(destination) and listed.binds.get(destination) == NULL)
    ]
    if differences:
        raise MountUnmatched(differences)
    directories, files = _mount_points(dumped, listed, sources | gpus, moved.values())
    offered = {mount.key: listed.named[mount.key] for mount in dumped if mount.key in listed.named}
    lines = (external(key, source) for key, source in needed.items())
    return Matching(tuple(lines), tuple(directories), tuple(files), offered | needed, moved)


def _moved(dumped: Sequence[DumpedMount], recorded: Sequence[ImageMount]) -> dict[str, str]:
    """Return where the dumped container had bind mounts whose declared destination led through links.

    There they are restored, whatever links the new root filesystem has. None is moved onto what the kernel shows, where
    a runtime would not have mounted it.
    """
    there = {mount.destination for mount in dumped if mount.key == mount.destination}
    return {
        mount.declared: mount.destination
        for mount in recorded
        if mount.declared and mount.type == "bind" and mount.destination in there and not _is_kernels(mount.destination)
    }


def _is_kernels(destination: str) -> bool:
    return any(Path(destination).is_relative_to(place) for place in KERNELS)


def _exists(source: str) -> bool:
    """Return whether an absolute path is that of something; one that the system does not even accept is not."""
    try:
        return source.startswith("/") and Path(source).exists()
    except (OSError, ValueError):
        return False


def _changed(mount: DumpedMount, listed: SpecMounts) -> Iterator[str]:
    if not mount.key and mount.destination in listed.binds:
        yield f"{mount.destination} was {mount.type} in the dumped container and is a bind mount in the new one"
    new = listed.others.get(mount.destination)
    if new is not None and not mount.key and new != mount.type and not _same_type(new, mount.type):
        yield f"{mount.destination} was {mount.type} in the dumped container and is {new} in the new one"


def _same_type(wanted: str, kernel: str) -> bool:
    """Return whether the kernel's type is what config.json asked for; version 1 cgroups hang below a tmpfs."""
    return wanted == "cgroup" and kernel in ("cgroup2", "tmpfs")


def _permits(policy: Sequence[str], source: str) -> bool:
    """Return whether the node's policy has the path, which must be written without detours."""
    if not source.startswith("/") or os.path.normpath(source) != source:
        return False
    return any(re.fullmatch(_any_name(pattern), source) for pattern in policy)


def _any_name(pattern: str) -> str:
    """Return the regular expression of a pattern in which `*` stands for any text but /."""
    return r"[^/\x00-\x1f]*".join(re.escape(part) for part in pattern.split("*"))


def _beyond(mount: DumpedMount, listed: SpecMounts) -> Iterator[str]:
    """Yield what a mount would allow and the new container's configuration does not.

    CRIU makes a mount as writable as it was, whatever config.json says of it, that of a volume, too.
    """
    place = listed.place_of(mount.destination)
    if mount.key == NULL or (not mount.key and mount.type in PRIVATE):
        return  # an empty file, or the container's own; some runtimes leave the tmpfs above version 1 cgroups writable
    if place is not None and {place, mount.key} & listed.unwritable and mount.writable:
        yield f"{mount.destination} is writable in the image and read-only in the new container's configuration"
    if place is None and not mount.key and not is_kept(mount):
        yield f"{mount.destination} is a mount of {mount.type}, which the new container's configuration does not have"


def _only_dumped(mount: DumpedMount, source: str, policy: Sequence[str]) -> str:
    if source and not _permits(policy, source):
        return (
            f"{mount.destination} was mounted by a hook from {source}, which `hook_mounts` of this node's configuration"
            " does not have"
        )
    if mount.key == NULL:
        return f"{mount.destination} was masked in the dumped container, and is not in the new one"
    if source:
        return f"{mount.destination} was mounted by a hook from {source}, which this node does not have"
    return f"{mount.destination} was mounted from outside the dumped container, and is not in the new one"


def _mount_points(
    dumped: Sequence[DumpedMount], listed: SpecMounts, sources: Mapping[str, str], moved: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the directories and the files that must be in the root filesystem, and that no runtime prepares.

    A mount on top of another one finds its place in that one's content, which the image or the host has.
    """
    mounted = {mount.id for mount in dumped}
    directories: list[str] = []
    files: list[str] = []
    for mount in dumped:
        unprepared = mount.destination in moved or not listed.accounts_for(mount.destination, mount.type)
        if mount.parent not in mounted and unprepared:
            source = listed.binds.get(mount.destination) or sources.get(mount.destination)
            (files if source and not Path(source).is_dir() else directories).append(mount.destination)
    return directories, files
