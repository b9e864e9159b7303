"""The changes of a container's root filesystem, as a tar file in the form of an OCI image layer.

Read from the overlay's upper directory, so the cost depends on what changed, not on the size of the image. The
container must be frozen meanwhile; others of its pod, to which it may have given descriptors of its directories, are
not, and so nothing is reached by its path.
Source: the OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.rootfs.overlay import Overlay
from kybernate_shim.checkpoint.tree_tar import TreeTar
from kybernate_shim.errors import Refused, Stopped
from kybernate_shim.linux.beneath import TreeFile, closing, open_top, walk
from kybernate_shim.linux.private_files import create_private

NAME: Final = "kybernate-rootfs-diff.tar"
WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"
# A label belongs to the place where a file is, not to the file: the runtime and the policy there give a new one.
LABELS: Final = frozenset({"security.selinux"})


@dataclass
class Diff:
    """What was done: entries of all kinds, `removed` of them whiteouts and opaque marks, and bytes of regular files."""

    entries: int = 0
    removed: int = 0
    bytes: int = 0


def write_diff(
    overlay: Overlay, target: Path, *, exclude: Iterable[str] = (), stopped: Callable[[], bool] = lambda: False
) -> Diff:
    """Write the changes in `overlay` to the new file `target`.

    `exclude` are the destinations of the container's mounts: what lies there is hidden, and was put there by the
    runtime. Other containers of the pod may change the tree meanwhile: they can make the diff fail, and no more. Raises
    Refused for what a layer cannot express (redirected directories, files without their data, names that
    begin with ".wh."), NoRoom before a file that does not fit on the disk, OSError, and Stopped soon after `stopped`
    returns true; `target` does not exist then.
    """
    hidden = names_of(exclude)

    def check() -> None:
        if stopped():
            raise Stopped("the diff was stopped before its end")

    removed = 0
    try:
        with create_private(target, exclusive=True) as stream, closing(open_top(overlay.upper)) as top:
            tar = TreeTar(stream, target.parent, check)
            for found in walk(top, skip=hidden.__contains__, check=check):
                removed += _add(tar, found, overlay.private)
            tar.finish()
        return Diff(tar.entries, removed, tar.file_bytes)
    except FileExistsError:
        raise
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def names_of(destinations: Iterable[str]) -> frozenset[str]:
    """Return the names below the root of the container's mounts, which a walk of its changes skips."""
    return frozenset(destination.strip("/") for destination in destinations)


def _add(tar: TreeTar, found: TreeFile, prefix: str) -> int:
    """Add what the upper directory has at a name, and return how many marks that took."""
    name, status = found.name, found.status
    if found.base.startswith(WHITEOUT):
        raise Refused(f"/{name}: a layer cannot hold a file whose name begins with {WHITEOUT}")
    if stat.S_ISSOCK(status.st_mode):
        return 0
    xattrs, private = _xattrs(found, prefix)
    for word, meaning in (("redirect", "a moved directory"), ("metacopy", "a file whose data is in a lower layer")):
        if word in private:
            raise Refused(f"/{name}: {meaning}; mount the overlay with redirect_dir=off,metacopy=off")
    if _is_whiteout(status, private):
        tar.mark(_beside(name, WHITEOUT + found.base))
        return 1
    tar.add(found, xattrs)
    if private.get("opaque") != b"y":
        return 0
    # First in its directory: applying it empties what the layers below have there.
    tar.mark(OPAQUE if name == "." else f"{name}/{OPAQUE}")
    return 1


def _beside(name: str, other: str) -> str:
    parent = name.rpartition("/")[0]
    return f"{parent}/{other}" if parent else other


def _is_whiteout(status: os.stat_result, private: dict[str, bytes]) -> bool:
    """Return whether the entry says "deleted": a device 0/0, or since Linux 6.7 an empty file marked as one."""
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    return stat.S_ISREG(status.st_mode) and status.st_size == 0 and "whiteout" in private


def _xattrs(found: TreeFile, prefix: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the attributes that the container sees, and those by which the overlay works, the latter by short name.

    An overlay within the container escapes its own attributes by a second `overlay.`, which is taken off here.
    """
    seen: dict[str, bytes] = {}
    private: dict[str, bytes] = {}
    for name, value in found.attributes().items():
        if name in LABELS:
            continue
        if not name.startswith(prefix):
            seen[name] = value
        elif name.startswith(f"{prefix}overlay."):
            seen[prefix + name.removeprefix(f"{prefix}overlay.")] = value
        else:
            private[name.removeprefix(prefix)] = value
    return seen, private
