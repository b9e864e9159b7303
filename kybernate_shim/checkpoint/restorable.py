"""What makes a dump restorable, while its processes are still frozen: the last step before a container may end.

Names that only the dump can know are put into the image, CRIU's list of removed files is brought into the order in
which a restore can remove them, files that grow elsewhere may do so, and then the proof is made. Where it cannot be,
there is no image, and the container continues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint import names, renamed
from kybernate_shim.checkpoint.criu.images import mounts
from kybernate_shim.checkpoint.criu.opened import OpenedFiles, forget_sizes, order_removals
from kybernate_shim.checkpoint.dump_request import DumpRequest
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.proof import AnyRoot, Root, Unproven, evidence, unproven
from kybernate_shim.checkpoint.rootfs.overlay import Overlay, find_overlay
from kybernate_shim.checkpoint.sockets import container_sockets
from kybernate_shim.checkpoint.target import Target
from kybernate_shim.checkpoint.volumes.places import lost, renewed
from kybernate_shim.checkpoint.volumes.renewed import mapped, renew
from kybernate_shim.errors import Refused
from kybernate_shim.linux.find_inodes import look, real_path, root_of
from kybernate_shim.linux.held_files import held_files

SHOWN: Final = 5


def not_restorable(container: str, problems: Sequence[str], remedy: str = "") -> Refused:
    """Return why an image is not completed: a restore of it would fail."""
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return Refused(
        f"container {container} could not be restored from this checkpoint: {'; '.join(problems[:SHOWN])}{more}."
        f" {remedy}There is no image, and it continues as before"
    )


@dataclass(frozen=True)
class SavedRoot:
    """The root filesystem of a container that is dumped, as a restore will see it: its image, and what is `saved`.

    `hidden` are the destinations of mounts: what the layers have there is not saved.
    """

    overlay: Overlay
    saved: bool
    hidden: Collection[str] = ()

    def lacks(self, path: str) -> str:
        parts = Path(path).parts[1:]
        if not parts:
            return ""
        if self.overlay.has_changed(parts):
            if not self.saved and not self._comes_anyway(path):
                return "is one of the changed files of the root filesystem, which are not in the image"
            above = next((place for place in self.hidden if Path(path).is_relative_to(place)), None)
            return f"lies below the mount at {above!a}, where changed files are not saved" if above else ""
        if self.overlay.has_unchanged(parts):
            return ""
        return "is neither in the container's image nor among the changed files"

    def _comes_anyway(self, path: str) -> bool:
        """Return whether a path is that of a directory of the image, or of one above a mount, which a restore makes."""
        return self.overlay.in_image(Path(path).parts[1:]) or any(Path(one).is_relative_to(path) for one in self.hidden)


def make_restorable(target: Target, request: DumpRequest, volumes: Collection[str] = ()) -> None:
    """Complete what CRIU has dumped into `request.image`, whose processes are frozen. Raises Refused and OSError.

    `volumes` are the names of the pod's own volumes whose content is in it. With `force`, what only another root
    filesystem or other mounts could have is left to the new container.
    """
    assert target.cgroup is not None
    pids = target.cgroup.processes()
    lenient = request.force
    root = _root(target, saved=request.rootfs_diff or request.rootfs_elsewhere or lenient)
    fresh = renewed(target.spec, target.bundle.rootfs)
    renew(request.image, mounts(request.image), fresh)
    found = evidence(request.image, root, lost={} if lenient else lost(target.spec, target.bundle.rootfs, volumes))
    with root_of(target.init_pid) as top:
        found = replace(found, opened=_without_links(found.opened, top))
        order_removals(request.image, found.opened, lambda path: look(top, path) is not None)
    forget_sizes(request.image, found.mounts.values())
    sockets = container_sockets(pids) if found.opened.unix else []
    binds = SpecMounts.of(target.spec, target.bundle.rootfs).binds
    known = renamed.find(found, sockets, pids, target.init_pid, binds)
    names.write(request.image, known.names)
    missing = unproven(replace(found, names=known.names))
    if problems := [*known.problems, *mapped(pids, fresh), *_described(missing, pids)]:
        remedy = "" if lenient or request.rootfs_diff else "Leave --no-rootfs away. "
        raise not_restorable(target.id, problems, remedy)


def _root(target: Target, *, saved: bool) -> Root:
    try:
        overlay = find_overlay(target.bundle.rootfs)
    except Refused:
        return AnyRoot()
    return SavedRoot(overlay, saved, [str(mount.get("destination") or "") for mount in target.spec.mounts])


def _without_links(opened: OpenedFiles, top: int) -> OpenedFiles:
    """Follow the links on the way to sockets, such as /var/run: CRIU has the paths that the programs gave."""
    return replace(opened, sockets=[replace(one, path=real_path(top, one.path)) for one in opened.sockets])


def _described(missing: Sequence[Unproven], pids: Sequence[int]) -> list[str]:
    """Say which process has each file open."""
    if not missing:
        return []
    wanted = {one.path for one in missing}
    holders = {held.path: held for held in held_files(pids, mapped=True) if held.path in wanted}
    return [f"{holders[one.path]}: it {one.why}" if one.path in holders else str(one) for one in missing]
