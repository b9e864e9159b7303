"""The last changes in memory, bounded by number and bytes. Pure.

A reader keeps a position of its own in the log, so that it costs no memory, however slow it is: one whose position has
fallen out of the log begins again with all that there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from google.protobuf.message import Message

MOST_ENTRIES = 4096
MOST_BYTES = 4 << 20
ENTRY_BYTES = 200  # that an entry takes besides its message


@dataclass(frozen=True, slots=True)
class Entry:
    """One change. The message is never changed once it is here."""

    revision: int
    kind: str
    message: Message
    time_ns: int
    removed: bool = False


class ChangeLog:
    """Entries in the order of their revisions; positions count from 0, and are never used twice."""

    def __init__(self, floor: int, *, most_entries: int = MOST_ENTRIES, most_bytes: int = MOST_BYTES) -> None:
        """`floor` is the revision before the first change."""
        self.floor = floor
        self.first = 0
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._entries: deque[Entry] = deque()
        self._bytes = 0

    @property
    def end(self) -> int:
        """The position of the next change."""
        return self.first + len(self._entries)

    def append(self, entry: Entry) -> None:
        """Add a change, and drop the oldest ones that there is no room for any more."""
        self._entries.append(entry)
        self._bytes += _size(entry)
        while len(self._entries) > self._most_entries or (self._bytes > self._most_bytes and len(self._entries) > 1):
            dropped = self._entries.popleft()
            self._bytes -= _size(dropped)
            self.floor = dropped.revision
            self.first += 1

    def at(self, position: int) -> Entry | None:
        """Return the change at a position that is not before `first`; None at the end."""
        return self._entries[position - self.first] if position < self.end else None

    def after(self, revision: int) -> int | None:
        """Return the position of the first change after `revision`; None where some of them are gone."""
        if revision < self.floor:
            return None
        return self.first + bisect_right(self._entries, revision, key=lambda entry: entry.revision)


def _size(entry: Entry) -> int:
    return entry.message.ByteSize() + ENTRY_BYTES
