"""Which mounts of a container are volumes that live and die with its pod, and which of them are wanted in an image.

The kubelet puts an emptyDir volume below the directory of its pod, whichever root directory it has been given, and a
subPath of a volume below another one; containerd puts /dev/shm below the directory of the sandbox. A source counts only
with the pod's or the sandbox's own id in it: the author of a pod chooses hostPath volumes, too.
Source: Kubernetes' pkg/kubelet/kubelet_getters.go and pkg/volume/emptydir; containerd's internal/cri/server.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from kybernate_shim.checkpoint.mounts.configured import declared, located
from kybernate_shim.errors import Refused
from kybernate_shim.linux.beneath import closing, path_of
from kybernate_shim.linux.descriptors import mount_of
from kybernate_shim.linux.mount.mountinfo import MountPoint, read_mountinfo
from kybernate_shim.linux.plain_files import LOOK
from kybernate_shim.linux.statx import status_of
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import POD_UID, SANDBOX_ID, requester_of

ANNOTATION: Final = "kybernate.io/volumes"
SHM: Final = "dev-shm"  # its name here: Kubernetes has none for it, and no volume can be called so twice
EMPTY_DIR: Final = re.compile(r".*/pods/([^/]+)/volumes/kubernetes\.io~empty-dir/([^/]+)")
SUBPATH: Final = re.compile(r"(.*/pods/([^/]+))/volume-subpaths/([^/]+)/[^/]+/\d+")
SANDBOX_SHM: Final = re.compile(r".*/sandboxes/([^/]+)/shm")
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")

# What the kubelet and containerd make for each pod, with content of its own.
RENEWED: Final = (
    re.compile(r".*/pods/([^/]+)/volumes/kubernetes\.io~(?:configmap|secret|projected|downward-api)/[^/]+"),
    re.compile(r".*/pods/([^/]+)/(?:etc-hosts|containers/[^/]+/[^/]+)"),
)
RENEWED_KINDS: Final = ("configmap", "secret", "projected", "downward-api")
SANDBOX_FILE: Final = re.compile(r".*/sandboxes/([^/]+)/(?:hostname|hosts|resolv\.conf)")

Kind = Literal["empty-dir", "shm"]


ABOVE: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
IN_MEMORY: Final = frozenset({"tmpfs", "hugetlbfs"})


def volume_covered(source: str, kind: str) -> OSError:
    """Return why a volume is not read: a filesystem that the kubelet has not mounted covers its directory."""
    return OSError(errno.EXDEV, f"a filesystem of the kind {kind} is mounted on the volume", source)


@dataclass(frozen=True)
class PodVolume:
    """A volume of the pod's own. `source` is its directory on the node, `destinations` where the container has it."""

    name: str
    kind: Kind
    source: str
    destinations: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Which volumes are wanted: `only` these, or all where it is None, except those to `leave` out."""

    only: frozenset[str] | None = None
    leave: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str) -> Choice:
        """Return what the annotation says: all, none, names, or names to leave that begin with a hyphen.

        Raises Refused.
        """
        words = [word.strip() for word in text.split(",") if word.strip()]
        if words in ([], ["all"]):
            return cls()
        if words == ["none"]:
            return cls(only=frozenset())
        taken = frozenset(word for word in words if not word.startswith("-"))
        left = frozenset(word[1:] for word in words if word.startswith("-"))
        odd = next((name for name in sorted(taken | left) if not NAME.fullmatch(name)), None)
        if odd is not None:
            raise Refused(
                f"{ANNOTATION}: {odd!a} is not the name of a volume; expected all, none, or names with commas, such as"
                f" data,{SHM}, or with hyphens those to leave, such as -scratch. Nothing was changed"
            )
        return cls(taken or None, left)

    @property
    def names(self) -> frozenset[str]:
        """All names that were given."""
        return self.leave | (self.only or frozenset())

    def takes(self, volume: PodVolume) -> bool:
        return volume.name not in self.leave and (self.only is None or volume.name in self.only)


def pod_volumes(spec: Spec) -> list[PodVolume]:
    """Return the volumes of the container that live and die with its pod, each once. None outside of a pod."""
    found: dict[str, PodVolume] = {}
    for mount in spec.mounts:
        volume = _volume(spec, mount)
        if volume is None:
            continue
        known = found.get(volume.source, replace(volume, destinations=()))
        found[volume.source] = replace(known, destinations=(*known.destinations, *volume.destinations))
    return list(found.values())


def open_volume(source: str) -> int:
    """Open the directory of a volume of the pod's own. Raises OSError.

    A program with the right to mount on the node can cover the directory with a filesystem of its own, which answers or
    does not. So it is pinned by a descriptor that asks no filesystem, and opened only where it lies in the filesystem
    of the kubelet's directories, or is one in memory.
    """
    directory, name = os.path.split(source)
    with (
        closing(os.open(directory, ABOVE)) as above,
        closing(os.open(name, LOOK | os.O_DIRECTORY, dir_fd=above)) as top,
    ):
        if (mount := _mount_of(top)) != _mount_of(above):
            kind = next((one.type for one in read_mountinfo() if one.id == mount), "unknown")
            if kind not in IN_MEMORY:
                raise volume_covered(source, kind)
        return os.open(path_of(top), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_directory(path: Path) -> bool:
    """Return whether a path is that of a directory, without a question to a filesystem that covers it."""
    try:
        return stat.S_ISDIR(status_of(str(path)).st_mode)
    except OSError:
        return False


def _mount_of(fd: int) -> int:
    return mount_of(f"/proc/self/fdinfo/{fd}")


def without_huge_pages(volumes: Iterable[PodVolume], mounts: Sequence[MountPoint]) -> list[PodVolume]:
    """Leave out volumes of huge pages, which no program reads or writes as files. `mounts` are the node's."""
    huge = {str(mount.path) for mount in mounts if mount.type == "hugetlbfs"}
    return [volume for volume in volumes if volume.source not in huge]


def _volume(spec: Spec, mount: Mapping[str, Any]) -> PodVolume | None:
    source = os.path.normpath(str(mount.get("source") or "/"))
    destination = os.path.normpath(declared(mount))
    if (match := EMPTY_DIR.fullmatch(source)) and _is_own(spec, match[1]):
        return PodVolume(match[2], "empty-dir", source, (destination,))
    if (match := SUBPATH.fullmatch(source)) and _is_own(spec, match[2]):
        volume = Path(match[1], "volumes/kubernetes.io~empty-dir", match[3])
        return PodVolume(match[3], "empty-dir", str(volume), (destination,)) if _is_directory(volume) else None
    if destination == "/dev/shm" and (match := SANDBOX_SHM.fullmatch(source)):
        return PodVolume(SHM, "shm", source, (destination,)) if match[1] == spec.annotations.get(SANDBOX_ID) else None
    return None


def renewed(spec: Spec, rootfs: Path) -> frozenset[str]:
    """Return where a container has ConfigMaps, tokens, /etc/hosts and the like, of which each pod has its own.

    Links on the way are followed as for the mounts themselves.
    """
    return frozenset(
        destination
        for mount, destination in located(spec, rootfs)
        if _is_renewed(spec, os.path.normpath(str(mount.get("source") or "/")))
    )


def _is_renewed(spec: Spec, source: str) -> bool:
    if match := SANDBOX_FILE.fullmatch(source):
        return match[1] == spec.annotations.get(SANDBOX_ID)
    if (match := SUBPATH.fullmatch(source)) and _is_own(spec, match[2]):
        return any(
            _is_directory(Path(match[1], "volumes", f"kubernetes.io~{kind}", match[3])) for kind in RENEWED_KINDS
        )
    return any((match := form.fullmatch(source)) and _is_own(spec, match[1]) for form in RENEWED)


def lost(spec: Spec, rootfs: Path, saved: Collection[str]) -> dict[str, str]:
    """Return the destinations of the pod's own volumes whose names are not in `saved`, each with what that means."""
    volumes = ((destination, _volume(spec, mount)) for mount, destination in located(spec, rootfs))
    what = "lies in the pod's volume {}, whose content is not in the image (annotation {})"
    return {
        destination: what.format(volume.name, ANNOTATION)
        for destination, volume in volumes
        if volume is not None and volume.name not in saved
    }


def _is_own(spec: Spec, uid: str) -> bool:
    """Return whether a pod's id is the container's own pod's, as containerd's CRI has noted it."""
    requester = requester_of(spec)
    return requester.is_tenant and bool(requester.uid) and uid == spec.annotations.get(POD_UID)
