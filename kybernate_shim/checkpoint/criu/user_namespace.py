"""An image as CRIU can read it for a container with ids of its own.

CRIU reads most of the image inside the new user namespace, whose root is another user of the node: so it sees a copy of
the mount in which that user has the files. And each pod that has ids of its own gets another range of the node's, while
the image names the dumped one's: in the copy, that file is another. The image itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from kybernate_shim.checkpoint.criu.credentials import USER_NAMESPACE
from kybernate_shim.checkpoint.criu.images import entries
from kybernate_shim.checkpoint.criu.opened import write_entries
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.idmap import mapped_copies, user_namespace
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.oci.spec import Spec

MAPS: Final = "kybernate-userns.img"  # in the work directory

Ranges = Sequence[Mapping[str, Any]]
Owners = Callable[[int, int], tuple[int, int]]


@contextmanager
def readable_inside(image: Path, spec: Spec, work: Path) -> Iterator[Path]:
    """Yield the directory from which CRIU restores: `image`, or a copy of its mount for a container with own ids.

    Raises CriuImageInvalid and OSError.
    """
    users, groups = (spec.linux.get(name) or () for name in ("uidMappings", "gidMappings"))
    files = sorted(image.glob("userns-*.img"))
    if len(files) != 1 or not users or not groups:
        yield image
        return
    with ExitStack() as undo:
        namespace = undo.enter_context(user_namespace(_text(users), _text(groups)))
        (copy,) = undo.enter_context(mapped_copies([str(image)], namespace))
        maps = _exchanged(files[0], users, groups, work / MAPS)
        syscalls.mount(str(maps), f"{copy}/{files[0].name}", "", syscalls.MS_BIND)
        yield Path(copy)


def moved_owners(image: Path, spec: Spec) -> Owners:
    """Return what makes of a file's owner and group, as the node sees them, those of the new container.

    Ids outside of the dumped container's ranges stay. Raises CriuImageInvalid.
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


def _exchanged(file: Path, users: Ranges, groups: Ranges, target: Path) -> Path:
    """Write the file with these ranges."""
    (found,) = entries(file, USER_NAMESPACE, criu.UserNamespace, most=1)
    for field, ranges in (("users", users), ("groups", groups)):
        found.ClearField(field)
        getattr(found, field).extend(_range(one) for one in ranges)
    write_entries(target, USER_NAMESPACE, [found])
    return target


def _range(one: Mapping[str, Any]) -> criu.IdRange:
    return criu.IdRange(inside=one.get("containerID", 0), outside=one.get("hostID", 0), count=one.get("size", 0))


def _text(ranges: Ranges) -> str:
    return ",".join(f"{one.get('containerID', 0)}:{one.get('hostID', 0)}:{one.get('size', 0)}" for one in ranges)
