"""Where a container's changed files are: the upper directory of the overlay that is its root filesystem.

Sources: the kernel's "Overlay Filesystem"; proc(5), "/proc/pid/mountinfo".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.errors import Refused
from kybernate_shim.linux.mountinfo import MountPoint, read_mountinfo


class RootfsUnsupported(Refused):
    """The changes of this root filesystem cannot be written as a diff. The message names the reason."""


@dataclass(frozen=True)
class Overlay:
    """An overlay's writable layer. `private` begins the names of the attributes that belong to the overlay itself."""

    upper: Path
    private: str = "trusted.overlay."


def find_overlay(rootfs: Path, mounts: Iterable[MountPoint] | None = None) -> Overlay:
    """Return the writable layer of the overlay mounted at `rootfs`, by what the kernel says of the mount.

    The kernel shows the upper directory in full, also where lower directories were given in a short form. Raises
    RootfsUnsupported when there is nothing mounted, no overlay, or no upper directory that can be reached.
    """
    real = rootfs.resolve()
    # The last one mounted is the one that is seen.
    mount = next((m for m in reversed(list(read_mountinfo() if mounts is None else mounts)) if m.path == real), None)
    if mount is None:
        raise RootfsUnsupported(f"{rootfs}: nothing is mounted there")
    if mount.type != "overlay":
        raise RootfsUnsupported(f"{rootfs}: the root filesystem is {mount.type}; changes are only found on overlay")
    options = dict(option.partition("=")[::2] for option in mount.super_options)
    if "upperdir" not in options:
        raise RootfsUnsupported(f"{rootfs}: the overlay has no upper directory, so nothing in it can have changed")
    upper = _directory(options["upperdir"])
    if upper is None:
        raise RootfsUnsupported(f"{rootfs}: its upper directory {options['upperdir']} cannot be reached from here")
    return Overlay(upper, "user.overlay." if "userxattr" in options else "trusted.overlay.")


def _directory(option: str) -> Path | None:
    """Return the directory that a mount option names: as it is, or with the backslashes taken off that mount(2) needs.

    Kernels differ in which of the two they show.
    """
    candidates = (Path(option), Path(re.sub(r"\\(.)", r"\1", option)))
    return next((path for path in candidates if path.is_absolute() and path.is_dir()), None)
