"""Writes what a pod's own volumes have into an image, while the container is frozen.

Other containers of the pod are not frozen, and change files meanwhile. What they write then is in the image or is not;
what is read lies in the volume in either case.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.manifest import ImageVolume
from kybernate_shim.checkpoint.rootfs.apply import PORTABLE, Powers
from kybernate_shim.checkpoint.tree_tar import ENTRY_BYTES, TreeTar
from kybernate_shim.checkpoint.volumes import marks
from kybernate_shim.checkpoint.volumes.places import (
    ANNOTATION,
    Choice,
    PodVolume,
    open_volume,
    pod_volumes,
    without_huge_pages,
)
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused, Stopped
from kybernate_shim.linux.attribute_ids import CAPABILITY
from kybernate_shim.linux.beneath import FirstNames, TreeFile, closing, walk
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.private_files import create_private
from kybernate_shim.oci.spec import Spec
from kybernate_shim.sizes import mib

FILE: Final = "kybernate-volume-{}.tar"
TRUSTED: Final = "trusted."
BLOCK: Final = 512  # bytes of st_blocks; source: stat(2)


def volumes_too_large(sizes: Mapping[str, int], limit: int) -> Refused:
    """Return the error: the pod's own volumes have more than an image may take. The container continues as before."""
    listed = ", ".join(f"{name} {mib(size)}" for name, size in sorted(sizes.items(), key=lambda one: -one[1]))
    largest = max(sizes, key=lambda name: sizes[name])
    return Refused(
        f"the volumes of the pod that would be in the image have {mib(sum(sizes.values()))} ({listed}), more than"
        f" `volumes_limit`, {mib(limit)}. Remove files, leave one out (`kybernate checkpoint --volumes=-{largest}`,"
        f" or annotation {ANNOTATION}: -{largest}), or raise the limit in /etc/kybernate/shim.toml; the container"
        " continues as before"
    )


@dataclass(frozen=True)
class Stopping:
    """Ends a walk soon after `stopped` returns true."""

    stopped: Callable[[], bool] = lambda: False

    def __call__(self) -> None:
        if self.stopped():
            raise Stopped("the volumes were not read to their end")


@dataclass(frozen=True)
class ChosenVolumes:
    """The volumes of a container that an image is to have, and the bytes that they have by now.

    `powers` are the container's: what it cannot make in a volume, no restore makes there for it.
    """

    volumes: tuple[PodVolume, ...]
    bytes: int
    limit: int
    powers: Powers = field(default_factory=Powers)


def wanted(
    spec: Spec, config: Config, *, chosen: str = "", stopped: Callable[[], bool] = lambda: False
) -> ChosenVolumes:
    """Find the pod's own volumes that an image is to have: those `chosen`, else those of the annotation.

    Raises Refused.
    """
    choice = Choice.of(chosen or config.pods_choice(spec.annotations, ANNOTATION))
    own = pod_volumes(spec)
    if chosen and (unknown := choice.names - {volume.name for volume in own}):
        raise Refused(
            f"{min(unknown)!r} is not one of the pod's own volumes in this container, which has"
            f" {', '.join(sorted(volume.name for volume in own)) or 'none'}. Nothing was changed"
        )
    found = [volume for volume in own if choice.takes(volume)]
    if found:
        found = without_huge_pages(found, read_mountinfo())
    sizes = measure(found, Stopping(stopped))
    require_small(sizes, config.volumes_limit)
    return ChosenVolumes(tuple(found), sum(sizes.values()), config.volumes_limit, powers=Powers.in_volume(spec))


def measure(volumes: Iterable[PodVolume], check: Callable[[], None] = Stopping()) -> dict[str, int]:
    """Return about how many bytes the files of each volume take, by the volume's name. Raises OSError.

    This counts their content without holes, and what an image stores besides for each of them.
    """
    sizes: dict[str, int] = {}
    for volume in volumes:
        first, size = FirstNames(), 0
        with closing(open_volume(volume.source)) as top:
            for found in walk(top, check=check, changing=True, read=False):
                size += ENTRY_BYTES + (_size(found) if first.of(found) == found.name else 0)
        sizes[volume.name] = size
    return sizes


def require_small(sizes: Mapping[str, int], limit: int) -> None:
    """Raise Refused where the volumes have more than `limit` bytes together."""
    if sum(sizes.values()) > limit:
        raise volumes_too_large(sizes, limit)


def save(what: ChosenVolumes, image: Path, *, stopped: Callable[[], bool] = lambda: False) -> tuple[ImageVolume, ...]:
    """Write the content of each volume into a file of its own in `image`, and return what the manifest has of them.

    Afterwards, either all of the files exist or none.

    Raises Refused, also where they have grown beyond the limit, NoRoom, OSError, and Stopped.
    """
    saved: list[ImageVolume] = []
    sizes: dict[str, int] = {}
    check = Stopping(stopped)
    targets = [image / FILE.format(number) for number in range(1, len(what.volumes) + 1)]
    try:
        for volume, target in zip(what.volumes, targets, strict=True):
            saved.append(_save(volume, target, check, what, sizes))
    except BaseException:
        for target in targets:
            target.unlink(missing_ok=True)
        raise
    return tuple(saved)


def _save(
    volume: PodVolume, target: Path, check: Callable[[], None], what: ChosenVolumes, sizes: dict[str, int]
) -> ImageVolume:
    """Write one volume, whose bytes in the image are added to `sizes`."""
    with create_private(target, exclusive=True) as stream, closing(open_volume(volume.source)) as top:
        identity = marks.identified(top)
        tar = TreeTar(stream, target.parent, check, changing=True)
        for found in walk(top, check=check, changing=True):
            if not stat.S_ISSOCK(found.status.st_mode):
                attributes = _portable(found.attributes())
                _require_makeable(volume, found, attributes, what.powers)
                try:
                    tar.add(found, attributes)
                except Refused as error:
                    raise Refused(f"volume {volume.name}: {error}; the container continues as before") from error
                sizes[volume.name] = tar.bytes
                require_small(sizes, what.limit)
        tar.finish()
    return ImageVolume(
        target.name, volume.name, volume.kind, volume.destinations, tar.entries, tar.data_bytes, identity
    )


def _require_makeable(volume: PodVolume, found: TreeFile, attributes: Iterable[str], powers: Powers) -> None:
    """Raise Refused for a file that another container of the pod has made, and a restore of this one cannot."""
    lacking = ""
    if not powers.devices and (stat.S_ISCHR(found.status.st_mode) or stat.S_ISBLK(found.status.st_mode)):
        lacking = "is a device node, which a restore makes only for a container with CAP_MKNOD"
    elif not powers.trusted_attributes and any(name.startswith(TRUSTED) for name in attributes):
        lacking = "has a trusted attribute, which a restore sets only for a container with CAP_SYS_ADMIN"
    if lacking:
        raise Refused(
            f"volume {volume.name}: /{found.name} {lacking}; leave the volume out (annotation {ANNOTATION}:"
            f" -{volume.name}). The container continues as before"
        )


def _portable(attributes: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the attributes that another volume can have; our own marks belong to this one."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in marks.MARKS and (name == CAPABILITY or name.startswith(PORTABLE))
    }


def _size(found: TreeFile) -> int:
    status = found.status
    return min(status.st_size, status.st_blocks * BLOCK) if stat.S_ISREG(status.st_mode) else 0
