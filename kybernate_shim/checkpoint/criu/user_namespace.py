"""The ranges of ids of an image's user namespace, exchanged for those of the new container.

Each pod that has ids of its own gets another range of the node's, and CRIU would map the range of the dumped one. The
image stays as it is: CRIU reads from a directory of links to it, in which one file is another.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kybernate_shim.checkpoint.criu.credentials import USER_NAMESPACE
from kybernate_shim.checkpoint.criu.images import entries
from kybernate_shim.checkpoint.criu.opened import write_entries
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.messages import criu_pb2 as criu
from kybernate_shim.oci.spec import Spec

DIRECTORY: Final = "images"

Ranges = Sequence[Mapping[str, Any]]


def with_new_ranges(image: Path, spec: Spec, work: Path) -> Path:
    """Return the directory from which CRIU restores: `image`, or one below `work` where the ranges differ.

    Raises CriuImageInvalid and OSError.
    """
    users, groups = (_ranges(spec.linux.get(name) or ()) for name in ("uidMappings", "gidMappings"))
    files = sorted(image.glob("userns-*.img"))
    if len(files) != 1 or not users or not groups:
        return image
    (found,) = entries(files[0], USER_NAMESPACE, criu.UserNamespace, most=1)
    if list(found.users) == users and list(found.groups) == groups:
        return image
    found.ClearField("users")
    found.ClearField("groups")
    found.users.extend(users)
    found.groups.extend(groups)
    directory = _linked(image, work / DIRECTORY)
    write_entries(directory / files[0].name, USER_NAMESPACE, [found])
    return directory


def _ranges(ranges: Ranges) -> list[criu.IdRange]:
    return [
        criu.IdRange(inside=one.get("containerID", 0), outside=one.get("hostID", 0), count=one.get("size", 0))
        for one in ranges
    ]


def _linked(image: Path, directory: Path) -> Path:
    """Make a directory with a link to each file of an image, in place of an earlier attempt's."""
    shutil.rmtree(directory, ignore_errors=True)
    make_directory(directory)
    for path in image.iterdir():
        (directory / path.name).symlink_to(path.absolute())
    return directory
