"""What can go wrong on the data path. Each message says what failed and how things are now."""

from __future__ import annotations


class VramError(Exception):
    """Moving VRAM bytes failed; never raised itself."""


class TargetGone(VramError):
    """The process has ended."""


class TargetRefused(VramError):
    """The kernel does not let us read or write the process's memory: nothing was changed, take the plain path."""


class RegionChanged(VramError):
    """A region is not, or not wholly, what it was: unmapped, shrunk, remapped, or no private memory any more."""


class FileFailed(VramError):
    """A file of the image cannot be written or read."""


class FileDamaged(VramError):
    """A file of the image is shorter or longer than the region that it holds."""


class DigestMismatch(VramError):
    """A file's bytes are not those that were saved. What was loaded of them is wrong: the process must not run."""


class HoldRefused(VramError):
    """The threads of a process could not be held, and nothing was changed: take the plain path."""


class HoldExpired(VramError):
    """The threads of a process were stopped for too long and were let go: its maps prove nothing any more."""


class NotDropped(VramError):
    """Pages could not be dropped, or no more of them: with those put back, take the plain path."""


class NotTakenAway(VramError):
    """The driver's copy is in a file of the image and has to stay there; the process has its bytes as they were."""


class NoArena(VramError):
    """The node's arena has no room for what an image has in it, or is not there."""


class NotInArena(VramError):
    """The node's arena has room for bytes of a process that were never copied there; nothing may be read from it."""


class NotArrived(VramError):
    """Bytes of an image that is arriving will not come; the message says why. Nothing may run without them."""


class CopyCancelled(VramError):
    """The caller's `cancel` event was set. What had been copied until then is in no defined state."""
