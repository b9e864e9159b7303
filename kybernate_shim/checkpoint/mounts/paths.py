"""Paths of mounts inside a root filesystem, which the image decides."""

from __future__ import annotations

import os
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


def resolve_in(rootfs: Path, destination: str) -> str:
    """Return `destination` with the links on its way followed as they look from inside `rootfs`; none leads outside.

    Runtimes do the same before they mount, so a Debian image's /var/run/secrets is /run/secrets to CRIU. A program may
    put links into the place of directories meanwhile: no file of the node's is asked where it leads.
    """
    try:
        top = beneath.open_top(rootfs)
    except OSError:
        return os.path.normpath("/" + destination.lstrip("/"))
    with beneath.closing(top):
        return _resolve(top, destination)


def _resolve(top: int, destination: str) -> str:
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
        target = _link(top, "/".join([*done, part])) if followed < 40 else ""  # as many as the kernel follows
        if target:
            followed += 1
            done = [] if target.startswith("/") else done
            pending += target.split("/")[::-1]
        else:
            done.append(part)
    return "/" + "/".join(done)


def _link(top: int, name: str) -> str:
    """Return where a link leads, "" for all else, such as a path that is too long for the system."""
    try:
        with beneath.closing(beneath.pin(top, name)) as fd:
            return os.readlink("", dir_fd=fd)
    except (OSError, ValueError):
        return ""
