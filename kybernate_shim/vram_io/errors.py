"""What can go wrong on the data path. Each message says what failed and how things are now."""

from __future__ import annotations


class VramError(Exception):
    """Moving VRAM bytes failed; the message says what must not run, or not be used, for that reason."""


class TargetGone(VramError):
    """The process has ended."""


class DataPathRefused(VramError):
    """The parallel path cannot be used for a process, which is as it was: take the plain path."""


class RegionChanged(VramError):
    """A region is not, or not entirely, what it was: unmapped, shrunk, remapped, or no private memory any more."""


class FileFailed(VramError):
    """A file of the image cannot be written or read."""


class NotTakenAway(VramError):
    """The driver's copy is in a file of the image and has to stay there; the process has its bytes as they were."""


class NotInArena(VramError):
    """The node's arena has room for bytes of a process that were never copied there; that room must not be read."""
