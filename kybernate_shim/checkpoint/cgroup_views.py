"""What a restored container sees of cgroups of version 1: its own, as at its first start.

The runtime shows a container a part of each hierarchy. CRIU shows a restored one the whole hierarchy, with the cgroups
of all containers of the node and limits that are not its own. So each is replaced by the part that is the container's
own now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.linux.cgroup.hierarchies import directories, parse_names
from kybernate_shim.linux.kernel_text import text_of
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import read_mountinfo
from kybernate_shim.linux.namespaces import CLONE_NEWNS, in_namespace

ATTRIBUTES = {
    "ro": syscalls.MOUNT_ATTR_RDONLY,
    "nosuid": syscalls.MOUNT_ATTR_NOSUID,
    "nodev": syscalls.MOUNT_ATTR_NODEV,
    "noexec": syscalls.MOUNT_ATTR_NOEXEC,
}


@dataclass(frozen=True)
class _View:
    """A mount of a hierarchy in a container that shows another part than `part`, a directory of the node's."""

    place: str
    part: Path
    attributes: int


def narrow(init: int) -> None:
    """Show the container of the process `init` no more of each hierarchy than its own cgroup. Raises OSError."""
    with ExitStack() as undo:
        trees = []
        for view in _too_wide(init):
            tree = syscalls.open_tree(
                syscalls.AT_FDCWD, str(view.part), syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC
            )
            undo.callback(os.close, tree)
            syscalls.mount_setattr(tree, "", syscalls.AT_EMPTY_PATH, attributes=view.attributes)
            trees.append((view.place, tree))
        if trees:
            in_namespace(Path(f"/proc/{init}/ns/mnt"), CLONE_NEWNS, lambda: _exchange(trees))


def _too_wide(init: int) -> Iterator[_View]:
    mounts = [mount for mount in read_mountinfo(init) if mount.type == "cgroup"]
    if not mounts:
        return
    names = parse_names(text_of(f"/proc/{init}/cgroup"))
    own = {path.stat().st_dev: (names[kind], path) for kind, path in directories(init).items() if kind in names}
    for mount in mounts:
        name, part = own.get(os.makedev(*map(int, mount.device.split(":"))), (mount.root, Path()))
        if mount.root != name:
            attributes = sum(bit for option, bit in ATTRIBUTES.items() if option in mount.options)
            yield _View(str(mount.path), part, attributes)


def _exchange(trees: list[tuple[str, int]]) -> None:
    for place, tree in trees:
        syscalls.umount(place, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        syscalls.move_mount(tree, "", syscalls.AT_FDCWD, place, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
