"""Marks at the top of a volume: attributes that no container can see or set, and that end with the volume.

A volume belongs to a pod, and not to a container. One mark says that a restore has filled it; the other one is its
identity, which an image keeps: so a restore knows the very volume that its content is from, where other containers may
have written since. Marks outlive a restart of the pod's sandbox, or of the node, where the content does.
"""

from __future__ import annotations

import errno
import os
from typing import Final

FILLED: Final = "trusted.kybernate.filled"
IDENTITY: Final = "trusted.kybernate.volume"
MARKS: Final = (FILLED, IDENTITY)
WITHOUT_ATTRIBUTES: Final = (errno.ENOTSUP, errno.EPERM)


def is_filled(top: int) -> bool:
    """Return whether a restore has filled the volume; where there are no attributes, whether anything is in it."""
    try:
        return FILLED in os.listxattr(top)
    except OSError as error:
        if error.errno not in WITHOUT_ATTRIBUTES:
            raise
        return bool(os.listdir(top))


def mark_filled(top: int) -> None:
    """Note that a restore has filled the volume."""
    _set(top, FILLED, b"1")


def identity_of(top: int) -> str:
    """Return the volume's identity, "" where it has none."""
    try:
        return os.getxattr(top, IDENTITY).decode(errors="replace")
    except OSError as error:
        if error.errno not in (*WITHOUT_ATTRIBUTES, errno.ENODATA):
            raise
        return ""


def identified(top: int) -> str:
    """Return the volume's identity, which it gets if it has none; "" where there are no attributes."""
    if known := identity_of(top):
        return known
    return new if _set(top, IDENTITY, (new := os.urandom(16).hex()).encode()) else ""


def _set(top: int, name: str, value: bytes) -> bool:
    try:
        os.setxattr(top, name, value)
    except OSError as error:
        if error.errno not in WITHOUT_ATTRIBUTES:
            raise
        return False
    return True
