"""Paths of mounts inside a root filesystem, which the image decides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.manifest import LONGEST_NAME

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


def resolve_in(rootfs: Path, destination: str) -> str:
    """Return `destination` with the links on its way followed as they look from inside `rootfs`; none leads outside.

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
        target = _link(rootfs.joinpath(*done, part)) if followed < 40 else ""  # as many as the kernel follows
        if target:
            followed += 1
            done = [] if target.startswith("/") else done
            pending += target.split("/")[::-1]
        else:
            done.append(part)
    return "/" + "/".join(done)


def _link(path: Path) -> str:
    """Return where a link leads, "" for all else, such as a path that is too long for the system."""
    try:
        return str(path.readlink())
    except (OSError, ValueError):
        return ""
