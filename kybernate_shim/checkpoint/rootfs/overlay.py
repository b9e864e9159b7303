"""The layers of the overlay that is a container's root filesystem: its changed files are in the upper directory.

Sources: the kernel's "Overlay Filesystem"; proc(5), "/proc/pid/mountinfo".
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.errors import Refused
from kybernate_shim.linux.mount.mountinfo import MountPoint, read_mountinfo
from kybernate_shim.linux.mount.overlay import lower_directories, unescaped


@dataclass(frozen=True)
class Overlay:
    """An overlay's layers. `private` begins the names of the attributes that belong to the overlay itself.

    `lower` are those of the image, topmost first, empty where they cannot be reached; `device` is its number.
    """

    upper: Path
    private: str = "trusted.overlay."
    lower: tuple[Path, ...] = ()
    device: str = ""

    def in_image(self, parts: Sequence[str]) -> bool:
        """Return whether the lower layers have a directory at the path of these parts, none of which is a link."""
        layers = list(self.lower)
        for part in parts:
            layers = self._next(layers, part)
        return bool(layers)

    def has_changed(self, parts: Sequence[str]) -> bool:
        """Return whether the upper layer has a file of any kind at the path of these parts, none of which is a link."""
        place = self.upper
        for part in parts[:-1]:
            place /= part
            if not _is_directory(place):
                return False
        return not self._hidden(self.upper.joinpath(*parts), missing=True)

    def has_unchanged(self, parts: Sequence[str]) -> bool:
        """Return whether the lower layers have a file of any kind at the path of these parts, none of which is a link.

        What the upper layer does to it does not count. True also where the layers cannot be reached.
        """
        layers = list(self.lower)
        for part in parts[:-1]:
            layers = self._next(layers, part)
        for layer in layers:
            if not self._hidden(layer / parts[-1], missing=True):
                return True
            if self._hidden(layer / parts[-1], missing=False):
                return False
        return not self.lower

    def _hidden(self, path: Path, *, missing: bool) -> bool:
        """Return whether a layer says that a file was deleted, or what `missing` says where it has none."""
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return missing
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == 0
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            return False
        return self._marked(path, "whiteout")

    def _next(self, layers: Iterable[Path], part: str) -> list[Path]:
        found = []
        for layer in layers:
            try:
                mode = (layer / part).lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(mode):
                break  # a whiteout, or a file: it hides what is below
            found.append(layer / part)
            if self._is_opaque(layer / part):
                break
        return found

    def _is_opaque(self, directory: Path) -> bool:
        return self._marked(directory, "opaque", b"y")

    def _marked(self, path: Path, mark: str, value: bytes | None = None) -> bool:
        """Return whether a file of a layer has an overlay mark with that value."""
        try:
            found = os.getxattr(path, f"{self.private}{mark}", follow_symlinks=False)
        except OSError:
            return False  # it has no such attribute
        return value is None or found == value


def find_overlay(rootfs: Path, mounts: Iterable[MountPoint] | None = None) -> Overlay:
    """Return the writable layer of the overlay mounted at `rootfs`, by what the kernel says of the mount.

    The kernel shows the upper directory in full, also where lower directories were given in a short form. Raises
    Refused when there is nothing mounted, no overlay, or no upper directory that can be reached.
    """
    real = rootfs.resolve()
    # The last one mounted is the one that is seen.
    mount = next((m for m in reversed(list(read_mountinfo() if mounts is None else mounts)) if m.path == real), None)
    if mount is None:
        raise Refused(f"{rootfs}: nothing is mounted there")
    if mount.type != "overlay":
        raise Refused(f"{rootfs}: the root filesystem is {mount.type}; changes are only found on overlay")
    options = dict(option.partition("=")[::2] for option in mount.super_options)
    if "upperdir" not in options:
        raise Refused(f"{rootfs}: the overlay has no upper directory, so nothing in it can have changed")
    upper = _directory(options["upperdir"])
    if upper is None:
        raise Refused(f"{rootfs}: its upper directory {options['upperdir']} cannot be reached from here")
    private = "user.overlay." if "userxattr" in options else "trusted.overlay."
    return Overlay(upper, private, _lower(mount.super_options, upper), mount.device)


def _lower(options: Sequence[str], upper: Path) -> tuple[Path, ...]:
    """Return the lower directories. Those in a short form are relative to what is above the upper one, too."""
    names = [unescaped(layer) for layer in lower_directories(options)]
    names += [option.removeprefix("lowerdir+=") for option in options if option.startswith("lowerdir+=")]
    for base in upper.parents:
        layers = tuple(base / name for name in names if name)
        if all(layer.is_dir() for layer in layers):
            return layers
    return ()


def _is_directory(path: Path) -> bool:
    """Return whether the path is a directory, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _directory(option: str) -> Path | None:
    """Return the directory that a mount option names: as it is, or without the backslashes that mount(2) needs.

    Kernels differ in which of the two they show.
    """
    candidates = (Path(option), Path(re.sub(r"\\(.)", r"\1", option)))
    return next((path for path in candidates if path.is_absolute() and path.is_dir()), None)
