"""Why a move to or from the arena was not done: names that the helper decides by, and that its clients see."""

from __future__ import annotations

from enum import StrEnum


class ArenaRefusal(StrEnum):
    """What kept the arena's worker from a move, or what has become of the process."""

    BUSY = "ARENA_BUSY"  # a thread of the program is in the middle of an allocation
    FULL = "ARENA_FULL"
    NO_ROOM = "ARENA_NO_ROOM"  # on the GPU
    LIBRARY = "ARENA_LIBRARY"  # the process does not answer, or lies
    FAILED = "ARENA_FAILED"
    UNLOCKED = "ARENA_UNLOCKED"  # its memory is back, and its threads may resume
    AWAY = "ARENA_AWAY"  # its memory is in the arena, and it must not be unlocked
