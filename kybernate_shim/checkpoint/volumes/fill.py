"""Puts the content of a pod's own volumes into those of a new pod, before anything of the container runs.

A volume belongs to a pod, and not to a container: several containers of a pod may be restored, each from an image that
has the volume as it was at a different time, and a container may be restored a second time, after it has written there.
So the first restore of a pod fills the volume, and leaves a mark. A later restore adds files that are not there, and
changes none. And a restore into the very volume that the content is from, by a container that is restarted in its pod,
does nothing there: other containers of the pod may have changed and removed files since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from kybernate_shim.checkpoint.image.manifest import ImageVolume
from kybernate_shim.checkpoint.rootfs.apply import Powers, apply_diff
from kybernate_shim.checkpoint.tree_tar import ENTRY_BYTES
from kybernate_shim.checkpoint.volumes import marks
from kybernate_shim.checkpoint.volumes.places import ANNOTATION, Choice, PodVolume, open_volume, pod_volumes
from kybernate_shim.errors import Damaged, Failed, Refused, Stopped
from kybernate_shim.linux.attribute_ids import Owners
from kybernate_shim.linux.beneath import closing
from kybernate_shim.oci.spec import Spec
from kybernate_shim.sizes import mib

PAUSE: Final = 0.05  # seconds between two looks whether another restore has filled the volume
_turn: Final = Lock()  # not one of the volume's files: a container could hold that


@dataclass(frozen=True)
class PlacedVolume:
    """A volume of the image, and the directory of the new pod's volume."""

    volume: ImageVolume
    directory: str


def placed(volumes: Sequence[ImageVolume], spec: Spec, chosen: str, limit: int) -> list[PlacedVolume]:
    """Return where the image's volumes go in the new container, except those that its annotation leaves out.

    `chosen` is the value of that annotation, `limit` in bytes for all together. Raises Refused.
    """
    choice = Choice.of(chosen)
    there = {place: volume for volume in pod_volumes(spec) for place in volume.destinations}
    fillings: list[PlacedVolume] = []
    for volume in volumes:
        for place in volume.destinations:
            new = there.get(place)
            if not choice.takes(PodVolume(volume.name, volume.kind, "", ())):
                continue
            if new is None or new.kind != volume.kind:
                raise Refused(
                    f"the image has the content of the volume {volume.name} at {place}, and the new container has no"
                    f" {volume.kind} volume of its pod there. Nothing was restored; give it one, or leave the content"
                    f" out (annotation {ANNOTATION}: -{volume.name})"
                )
            filling = PlacedVolume(volume, new.source)
            if filling not in fillings:
                fillings.append(filling)
    volumes_taken = {one.volume for one in fillings}
    if (total := sum(volume.bytes + volume.entries * ENTRY_BYTES for volume in volumes_taken)) > limit:
        raise Refused(
            f"the image has {mib(total)} of its pod's volumes, more than `volumes_limit` of this node, {mib(limit)}."
            " Nothing was restored; raise it in /etc/kybernate/shim.toml"
        )
    return fillings


def fill(
    fillings: Sequence[PlacedVolume],
    image: Path,
    sizes: Mapping[str, int],
    spec: Spec,
    *,
    owners: Owners = lambda user, group: (user, group),
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Fill the new pod's volumes from the files of `image`, whose `sizes` are known, and return the bytes written.

    `owners` maps a user and a group of the image to those that a file gets.

    Raises Failed, and Stopped soon after `stopped` returns true.
    """
    done = 0
    for filling in fillings:
        name = filling.volume.file
        try:
            with _alone_in(Path(filling.directory), stopped) as top:
                if filling.volume.id and filling.volume.id == marks.identity_of(top):
                    continue
                written = apply_diff(
                    image / name,
                    top,
                    size=sizes[name],
                    powers=Powers.in_volume(spec),
                    owners=owners,
                    stopped=stopped,
                    layer=False,
                    keep=marks.is_filled(top),
                )
                marks.mark_filled(top)
        except (OSError, Damaged) as error:
            raise Failed(
                f"the volume {filling.volume.name} of the new pod cannot be filled: {error}. Nothing was restored"
            ) from error
        done += written.bytes
    return done


@contextmanager
def _alone_in(directory: Path, stopped: Callable[[], bool]) -> Iterator[int]:
    """Open a volume while no other restore of this daemon, and so of the pod, fills one. Raises Stopped."""
    while not _turn.acquire(timeout=PAUSE):
        if stopped():
            raise Stopped
    try:
        with closing(open_volume(str(directory))) as top:
            yield top
    finally:
        _turn.release()
