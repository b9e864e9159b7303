"""Sources of bind mounts where the root of a user namespace reaches them, and with the owners that it is to see.

A runtime's start opens the sources as the node's root, before anything is in the namespace. CRIU opens them as the
namespace's root, who may not pass through directories such as /var/lib/kubelet; and it makes no idmapped mounts, by
which the kubelet's volumes have the same owners for each pod. So CRIU gets a directory in memory, through which that
root and no other user may pass, with a mount of each source. It is not in the bundle, which containerd removes with all
that is in it.
Sources: CRIU's mount-v2.c, __do_bind_mount_v2; runc's criu_linux.go, addCriuRestoreMount.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate_shim.checkpoint.criu.user_namespace import root_of_ids
from kybernate_shim.checkpoint.mounts.matching import external
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.idmap import map_mount, user_namespace
from kybernate_shim.linux.mount.rootfs import unmount_tree
from kybernate_shim.oci.spec import Spec, map_text
from kybernate_shim.run_directory import SOURCES


@dataclass(frozen=True)
class ReachableSource:
    """A bind mount of the image by its key, the node's path, and the maps of ids of an idmapped mount, "" for none."""

    key: str
    source: str
    users: str = ""
    groups: str = ""


@dataclass(frozen=True)
class ReachableSources:
    """All bind mounts of a container with a user namespace; none of one without. `group` is its root's, on the node."""

    place: Path
    group: int = 0
    sources: tuple[ReachableSource, ...] = ()

    @classmethod
    def of(cls, spec: Spec, work: Path, sources: Mapping[str, str]) -> ReachableSources:
        """Take the node's paths of a container's bind mounts, by their keys. `work` is the restore's directory."""
        place = SOURCES / work.name
        if spec.namespace_path("user") is None:
            return cls(place)
        group = root_of_ids(spec.linux.get("gidMappings") or ())
        maps = {str(mount.get("source") or ""): _maps(mount) for mount in spec.mounts}
        found = (ReachableSource(key, source, *maps.get(source, ("", ""))) for key, source in sources.items())
        return cls(place, group, tuple(found))

    @property
    def lines(self) -> tuple[str, ...]:
        """What CRIU's configuration needs; CRIU takes it before what the runtime says of the same keys."""
        return tuple(external(one.key, str(self.place / str(number))) for number, one in enumerate(self.sources))

    @contextmanager
    def made(self) -> Iterator[None]:
        """Keep the mounts while CRIU runs. Raises OSError."""
        if not self.sources:
            yield
            return
        with ExitStack() as undo:
            SOURCES.mkdir(mode=0o711, exist_ok=True)
            unmount_tree(self.place)  # of a restore whose daemon was killed
            self.place.mkdir(exist_ok=True)
            undo.callback(self.place.rmdir)
            options = f"mode=0710,gid={self.group}"
            syscalls.mount("tmpfs", str(self.place), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
            undo.callback(syscalls.umount, str(self.place), syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
            syscalls.mount("", str(self.place), "", syscalls.MS_PRIVATE)
            for number, one in enumerate(self.sources):
                _mount(one, self.place / str(number))
            yield


def _mount(one: ReachableSource, target: Path) -> None:
    if Path(one.source).is_dir():
        target.mkdir()
    else:
        target.touch()
    syscalls.mount(one.source, str(target), "", syscalls.MS_BIND)
    if one.users and one.groups:
        with user_namespace(one.users, one.groups) as namespace:
            map_mount(str(target), namespace)


def _maps(mount: Mapping[str, Any]) -> tuple[str, str]:
    users, groups = (mount.get(name) or () for name in ("uidMappings", "gidMappings"))
    return map_text(users), map_text(groups)
