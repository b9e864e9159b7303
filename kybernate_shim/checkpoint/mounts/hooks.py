"""Mounts that hooks have added to a running container, which config.json does not list."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kybernate_shim.checkpoint.criu.config import line
from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.linux.mount.mountinfo import MountPoint
from kybernate_shim.oci.spec import Spec

OVERLAY: Final = "overlay"
Action = Literal["keep", "external", "drop"]
# What is done about a hook's mounts, first match wins; those that match nothing are kept when they are the container's
# own, and external when they are the host's.
HOOK_POLICY: Final[Sequence[tuple[str, Action]]] = (
    # Made again by NVIDIA's hooks at every start, under a name with a new UUID; small, and part of the image.
    ("/run/nvidia-ctk-hook*", "keep"),
    ("/proc/driver/nvidia/params", "keep"),
    # One directory of the host's /proc for each GPU, by PCI address: none of them need exist on another node.
    ("/proc/driver/nvidia/gpus/*", "drop"),
)


@dataclass(frozen=True)
class HookMount:
    """A mount that config.json does not list. `source` is where the host sees the same, "" where it does not."""

    destination: str
    type: str
    action: Action
    source: str = ""


def hook_mounts(
    spec: Spec, rootfs: Path, container: Iterable[MountPoint], host: Sequence[MountPoint]
) -> list[HookMount]:
    """Find what hooks mounted into a running container, by comparing its mounts with config.json.

    `container` are the mounts of its init, `host` ours. A mount whose filesystem we have mounted too is the host's, but
    for one that shows a part of the container's root filesystem, which a program in there has mounted.
    """
    listed, mounts = SpecMounts.of(spec, rootfs), list(container)
    own = {mount.device for mount in mounts if str(mount.path) == "/" and mount.type == OVERLAY}
    return [
        _judge(mount, () if mount.device in own else host, listed)
        for mount in mounts
        if str(mount.path) != "/" and not listed.accounts_for(str(mount.path), mount.type)
    ]


def dump_lines(found: Iterable[HookMount], listed: SpecMounts | None = None) -> list[str]:
    """Return the lines of CRIU's configuration by which a dump accepts the mounts of hooks.

    And bind mounts that config.json lists, but that runtimes announce to CRIU by another name than theirs.
    """
    unnamed = [place for place in listed.binds if place not in listed.named] if listed is not None else []
    lines = [line("external", f"mnt[{place}]:{place}") for place in unnamed]
    for mount in found:
        if mount.action == "external":
            lines.append(line("external", f"mnt[{mount.destination}]:{mount.destination}"))
        elif mount.action == "drop":
            lines.append(line("skip-mnt", mount.destination))
    return lines


def _judge(mount: MountPoint, host: Sequence[MountPoint], listed: SpecMounts) -> HookMount:
    destination = str(mount.path)
    sources = list(_host_paths(mount, host))
    below = (source for source in sources if listed.shows(destination, source, host))
    source = next(below, sources[0] if sources else "")
    action: Action = "external" if source else "keep"
    for pattern, wanted in HOOK_POLICY:
        if fnmatch.fnmatchcase(destination, pattern):
            action = wanted
            break
    return HookMount(destination, mount.type, action, source if action == "external" else "")


def _host_paths(mount: MountPoint, host: Sequence[MountPoint]) -> Iterator[str]:
    """Yield where the host sees what `mount` shows."""
    for candidate in host:
        if candidate.device == mount.device and Path(mount.root).is_relative_to(candidate.root):
            yield str(candidate.path / Path(mount.root).relative_to(candidate.root))


def is_kept(mount: DumpedMount) -> bool:
    return any(action == "keep" and fnmatch.fnmatchcase(mount.destination, pattern) for pattern, action in HOOK_POLICY)
