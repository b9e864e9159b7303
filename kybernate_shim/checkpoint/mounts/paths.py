"""Paths of mounts inside a root filesystem, which the image decides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.manifest import LONGEST_NAME
from kybernate_shim.linux import beneath

PATH_MAX: Final = 4096  # bytes, with the one that ends it; source: linux/limits.h


def is_normal(destination: str) -> bool:
    """Return whether a path is absolute, fits a system call, and has only parts that a mount point may have."""
    parts = destination.split("/")[1:]
    if not destination.startswith("/") or "" in parts or not all(map(_is_name, parts)):
        return False
    return len(os.fsencode(destination)) < PATH_MAX


def _is_name(part: str) -> bool:
    if part in (".", "..") or any(mark < " " or mark == "\x7f" for mark in part):
        return False
    try:
        return len(os.fsencode(part)) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


class MadeMounts:
    """The root filesystem and the mounts made in it so far, through which a runtime finds the next one's place.

    Only names come of it, and what a link says is never a path outside the container.
    """

    def __init__(self, rootfs: Path) -> None:
        self._made: dict[str, Path | None] = {"/": rootfs}

    def add(self, destination: str, source: Path | None) -> None:
        """Have the host's `source` at a resolved `destination`; None for what has no links, such as a new tmpfs."""
        self._made[destination] = source

    def resolve(self, destination: str) -> str:
        """Return `destination` with the links on its way followed as they look from inside; none leads outside.

        Runtimes do the same before they mount, so a Debian image's /var/run/secrets is /run/secrets to CRIU.
        """
        pending = destination.split("/")[::-1]
        done: list[str] = []
        followed = 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            target = self._link([*done, part]) if followed < 40 else ""  # as many as the kernel follows
            if target:
                followed += 1
                done = [] if target.startswith("/") else done
                pending += target.split("/")[::-1]
            else:
                done.append(part)
        return _joined(done)

    def _link(self, parts: list[str]) -> str:
        """Return where a link leads, "" for all else, such as a mount or a path that is too long for the system."""
        if _joined(parts) in self._made:
            return ""
        above = next(count for count in range(len(parts) - 1, -1, -1) if _joined(parts[:count]) in self._made)
        source = self._made[_joined(parts[:above])]
        return _link(source, "/".join(parts[above:])) if source is not None else ""


def resolve_in(rootfs: Path, destination: str) -> str:
    """Return `destination` as it is in a root filesystem without mounts: what runtimes call a bind mount to CRIU."""
    return MadeMounts(rootfs).resolve(destination)


def _joined(parts: Sequence[str]) -> str:
    return "/" + "/".join(parts)


def _link(top: Path, name: str) -> str:
    """Return where the link `name` below `top` leads, "" for all else, such as a path too long for the system.

    `top` is found as the runtime finds it; below, a program may put links into the place of directories meanwhile, and
    no file of the node's is asked where it leads.
    """
    try:
        directory = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        with beneath.closing(directory), beneath.closing(beneath.pin(directory, name)) as fd:
            return os.readlink("", dir_fd=fd)
    except (OSError, ValueError):
        return ""
