"""Mount points that a restore creates in the root filesystem, at places that an image names."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.mounts.matching import Matching
from kybernate_shim.checkpoint.mounts.paths import is_normal
from kybernate_shim.linux import beneath

NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_mount_points(matching: Matching, rootfs: Path) -> None:
    """Create the mount points that are missing in the mounted root filesystem. Raises OSError.

    No link and no way up is followed, and nothing is opened that is there, since the image decides what that is.
    """
    for destination in (*matching.directories, *matching.files):
        if not is_normal(destination):
            raise OSError(errno.EINVAL, "not a path inside the root filesystem", destination)
        *parents, name = destination.strip("/").split("/")
        directory = beneath.open_top(rootfs)
        try:
            for part in parents:
                _make_directory(part, directory)
                directory, outer = beneath.open_directory(directory, part), directory
                os.close(outer)
            if destination in matching.directories:
                _make_directory(name, directory)
            else:
                _make_file(name, directory)
        finally:
            os.close(directory)


def _make_file(name: str, parent: int) -> None:
    try:
        os.close(os.open(name, NEW_FILE, 0o644, dir_fd=parent))
    except FileExistsError:
        pass


def _make_directory(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        pass
