"""Why the arena does not give back bytes of a process."""

from __future__ import annotations


class ArenaIncomplete(Exception):
    """The arena has room for bytes of a process, and not all of the bytes; the message says why."""


def never_copied(pid: int, pending: int) -> ArenaIncomplete:
    """Return the error: so many bytes have not come from the process."""
    return ArenaIncomplete(
        f"{pending >> 20} MiB of process {pid} were never copied to the arena: they are in its VRAM, unless it has"
        " released them; resume it before anything else is done with it"
    )


def is_parked(pid: int, directory: str) -> ArenaIncomplete:
    """Return the error: the bytes are on a disk, and come back by a resume of the container."""
    return ArenaIncomplete(f"the VRAM of process {pid} is parked in {directory}; `kybernate resume` brings it back")


def filler_ended(pid: int) -> ArenaIncomplete:
    """Return the error: the process that was filling the room has given up or ended."""
    return ArenaIncomplete(f"process {pid}, which was reading the bytes from an image, has given up or ended")
