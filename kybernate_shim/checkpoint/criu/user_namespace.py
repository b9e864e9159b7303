"""An image as CRIU can read it for a container with ids of its own.

CRIU reads most of the image inside the new user namespace, whose root is another user of the node. So it gets a
directory in memory that every user may pass through, with each file of the image bound into it in such a way that this
user owns it. Before the namespace has its ids, CRIU reads one file (timens) as a user without rights: that is a copy
which all may read, and holds nothing but offsets of clocks. And each pod that has ids of its own gets another range of
the node's, while the image names the dumped one's: that file is another, too. The image itself stays as it is.

A container of a pod with users of its own (`hostUsers: false`) shares the pod's user namespace, which CRIU would make
again instead of entering it: a library that is preloaded into CRIU (join_user.c) begins the container there.
Source: CRIU's cr-restore.c, where prepare_timens comes before the maps of ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kybernate_shim.checkpoint.criu.credentials import USER_NAMESPACE
from kybernate_shim.checkpoint.criu.images import entries
from kybernate_shim.checkpoint.criu.opened import write_entries
from kybernate_shim.errors import Refused
from kybernate_shim.linux.attribute_ids import Owners
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.idmap import mapped_copies, user_namespace
from kybernate_shim.linux.private_files import copy_private, make_directory, write_private
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.native import JOINER
from kybernate_shim.oci.spec import Spec, map_text

DIRECTORY: Final = "images"  # in the work directory
TIMES: Final = "timens-*.img"
LIBRARY: Final = JOINER.of()
NAMESPACE: Final = "KYBERNATE_USER_NAMESPACE"  # the library's variable: the path of the namespace

Ranges = Sequence[Mapping[str, Any]]


def shared_namespace(spec: Spec) -> str:
    """Return the path of the user namespace that a container shares with its pod, "" for none."""
    return spec.namespace_path("user") or ""


def joined_environment(spec: Spec) -> dict[str, str]:
    """Return what the runtime's environment needs so that CRIU restores into the pod's user namespace.

    Raises Refused.
    """
    if not (path := shared_namespace(spec)):
        return {}
    if not LIBRARY.exists():
        raise Refused(
            f"{LIBRARY} is not there, and CRIU cannot enter the user namespace of a pod (`hostUsers: false`) without"
            " it: install Kybernate again where there is a C compiler. Nothing was changed"
        )
    return {NAMESPACE: path, "LD_PRELOAD": ":".join(filter(None, (str(LIBRARY), os.environ.get("LD_PRELOAD"))))}


@contextmanager
def readable_inside(
    image: Path, spec: Spec, work: Path, replaced: Mapping[str, bytes] = MappingProxyType({})
) -> Iterator[Path]:
    """Yield the directory from which CRIU restores: `image`, or one that has other content under the names `replaced`.

    For a container with own ids, what lies there belongs to its root. Raises Damaged and OSError.
    """
    users, groups = (spec.linux.get(name) or () for name in ("uidMappings", "gidMappings"))
    files = sorted(image.glob("userns-*.img"))
    inside = len(files) == 1 and bool(users) and bool(groups)
    if not inside and not replaced:
        yield image
        return
    place = work / DIRECTORY
    with ExitStack() as undo:
        copy, owner = str(image), (0, 0)
        if inside:
            namespace = undo.enter_context(user_namespace(map_text(users), map_text(groups)))
            (copy,) = undo.enter_context(mapped_copies([str(image)], namespace))
            owner = (root_of_ids(users), root_of_ids(groups))
        make_directory(place)
        syscalls.mount("tmpfs", str(place), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0711")
        undo.callback(syscalls.umount, str(place), syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        syscalls.mount("", str(place), "", syscalls.MS_PRIVATE)
        for path in image.iterdir():
            target = place / path.name
            if path.name in replaced:
                write_private(target, replaced[path.name])
                os.chown(target, *owner)
            elif inside and path.name == files[0].name:
                _exchange(path, users, groups, target)
            elif inside and path.match(TIMES):
                copy_private(path, target)
                target.chmod(0o644)
            else:
                target.touch(mode=0o600)
                syscalls.mount(f"{copy}/{path.name}", str(target), "", syscalls.MS_BIND)
        yield place


def root_of_ids(ranges: Ranges) -> int:
    """Return which of the node's ids is 0 in a map of ids, 0 where none is."""
    return next((int(one.get("hostID", 0)) for one in ranges if not one.get("containerID", 0)), 0)


def moved_owners(image: Path, spec: Spec) -> Owners:
    """Return what makes of a file's owner and group, as the node sees them, those of the new container.

    Ids outside of the dumped container's ranges stay. Raises Damaged.
    """
    files = sorted(image.glob("userns-*.img"))
    users, groups = (spec.linux.get(name) or () for name in ("uidMappings", "gidMappings"))
    if len(files) != 1 or not users or not groups:
        return lambda user, group: (user, group)
    (found,) = entries(files[0], USER_NAMESPACE, criu.UserNamespace, most=1)
    new_users, new_groups = (list(map(_range, ranges)) for ranges in (users, groups))
    return lambda user, group: (
        _moved(user, list(found.users), new_users),
        _moved(group, list(found.groups), new_groups),
    )


def _moved(number: int, before: Sequence[criu.IdRange], after: Sequence[criu.IdRange]) -> int:
    for old in before:
        if 0 <= number - old.outside < old.count:
            inside = number - old.outside + old.inside
            for new in after:
                if 0 <= inside - new.inside < new.count:
                    return inside - new.inside + new.outside
    return number


def _exchange(file: Path, users: Ranges, groups: Ranges, target: Path) -> None:
    """Write the file with these ranges to another place."""
    (found,) = entries(file, USER_NAMESPACE, criu.UserNamespace, most=1)
    for field, ranges in (("users", users), ("groups", groups)):
        found.ClearField(field)
        getattr(found, field).extend(_range(one) for one in ranges)
    write_entries(target, USER_NAMESPACE, [found])


def _range(one: Mapping[str, Any]) -> criu.IdRange:
    return criu.IdRange(inside=one.get("containerID", 0), outside=one.get("hostID", 0), count=one.get("size", 0))
