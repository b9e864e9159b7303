"""Why the arena does not take bytes of a process, or give them back."""

from __future__ import annotations


class ArenaIncomplete(Exception):
    """The arena has room for blocks of a process, and not their bytes."""

    def __init__(self, pid: int, pending: int) -> None:
        super().__init__(
            f"{pending >> 20} MiB of process {pid} were never copied to the arena: they are in its VRAM, unless it has"
            " released them; resume it before anything else is done with it"
        )


class FillingEnded(Exception):
    """What a process has in the arena is not all there, and the process that was filling it has given up or ended."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"process {pid}, which was reading the bytes from an image, has given up or ended")


class ArenaUnavailable(Exception):
    """The node's memory for it cannot be set up; the message says why."""
