"""Which bytes of files are there: sources cut files at different places, so parts alone do not say it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Ranges:
    """Ranges of files, added in any order; those that touch or overlap become one. One thread at a time."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[list[int], list[int]]] = {}  # the begins and the ends, both rising

    def add(self, file: str, offset: int, size: int) -> None:
        """Note that bytes of a file are there."""
        if size <= 0:
            return
        begins, ends = self._of.setdefault(file, ([], []))
        first, after = bisect_left(ends, offset), bisect_right(begins, offset + size)
        begin = min([offset, *begins[first:after]])
        end = max([offset + size, *ends[first:after]])
        begins[first:after], ends[first:after] = [begin], [end]

    def missing(self, file: str, offset: int, size: int) -> list[tuple[int, int]]:
        """Return what is not there of a range, as (offset, bytes) in rising order."""
        begins, ends = self._of.get(file, ([], []))
        found, at, end = [], offset, offset + size
        for number in range(bisect_right(ends, offset), len(begins)):
            if begins[number] >= end:
                break
            if begins[number] > at:
                found.append((at, begins[number] - at))
            at = ends[number]
        if at < end:
            found.append((at, end - at))
        return found

    def has(self, file: str, offset: int, size: int) -> bool:
        """Return whether all bytes of a range are there."""
        return not self.missing(file, offset, size)
