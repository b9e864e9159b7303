"""The file to which a container's output is written, read from its end and followed.

containerd writes the output of a pod's container where its caller, kubelet or `kybernate up`, has told it to:
`…/CONTAINER/N.log`, of which each line is "TIME STREAM TAG TEXT". A long line of a program has several with the tag P,
and the last one F. Each start has a file of its own, N+1, and kubelet rotates the newest: another file gets its
name. The text is the tenant's, its amount and its pace too: what is kept of it is bounded here. The path never is the
tenant's: it comes from containerd.
Source: the CRI's logging format, kubernetes/design-proposals-archive/node/kubelet-cri-logging.md.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from kybernate.node.failure import Missing
from kybernate_shim.linux.plain_files import open_plain

READ_BYTES: Final = 64 << 10  # at a time
TAIL_BYTES: Final = 4 << 20  # of what was written before, at most
LINES: Final = 10_000  # of what was written before, at most
LINE_BYTES: Final = 16 << 10  # of a line that are kept; the rest of it is left out, and that is said
STREAMS: Final = (b"stdout", b"stderr")
TIME: Final = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[0-9.:Z+-]*", re.ASCII)


@dataclass(frozen=True)
class Line:
    """A line that a program has written. `time` is in seconds since 1970, 0 where it is unknown.

    `cut`: it has more than LINE_BYTES, and the rest is left out.
    """

    text: str
    time: float = 0.0
    stream: str = "stdout"
    cut: bool = False

    def __str__(self) -> str:
        return f"{self.text}{' […]' if self.cut else ''}\n"


class LogFile:
    """The log at `path`, which is opened by the first read, and read on over rotations and further starts.

    `at_end`: the last read has found nothing. Before that, there is more to read, although no line was whole.

    All methods block for as long as the disk does, and for no writer.
    """

    def __init__(self, path: Path) -> None:
        self.at_end = False
        self._path = path
        self._descriptor = -1
        self._lines = Lines()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def tail(self, count: int) -> list[Line]:
        """Return the last lines of the newest file, at most `count`, and read on from there. Raises Missing."""
        self.close()
        self._descriptor, self._lines = _open(_newest(self._path)), Lines()
        count = min(max(0, count), LINES)
        os.lseek(self._descriptor, _start_of(self._descriptor, count), os.SEEK_SET)
        found: list[Line] = []
        end = os.fstat(self._descriptor).st_size
        while os.lseek(self._descriptor, 0, os.SEEK_CUR) < end and (data := os.read(self._descriptor, READ_BYTES)):
            found = (found + self._lines.take(data))[-count:] if count else self._lines.take(data)[:0]
        return found

    def more(self) -> list[Line]:
        """Return lines that came since the last read, a part of them where they are many; none where there are none."""
        if (data := self._read()) or not self._is_replaced():
            return self._lines.take(data)
        if data := self._read():  # the writer had not gone over to the other file yet when the end was seen
            return self._lines.take(data)
        try:
            descriptor = _open(_newest(self._path))
        except Missing:
            return []  # between two steps of a rotation
        self.close()
        self._descriptor, self._lines = descriptor, Lines()
        return self._lines.take(self._read())

    def _read(self) -> bytes:
        if os.fstat(self._descriptor).st_size < os.lseek(self._descriptor, 0, os.SEEK_CUR):
            os.lseek(self._descriptor, 0, os.SEEK_SET)  # it was truncated in place, as other rotations do
            self._lines = Lines()
        data = os.read(self._descriptor, READ_BYTES)
        self.at_end = not data
        return data

    def _is_replaced(self) -> bool:
        try:
            newest, read = _newest(self._path).lstat(), os.fstat(self._descriptor)
        except OSError:
            return False
        return (newest.st_dev, newest.st_ino) != (read.st_dev, read.st_ino)


@dataclass
class Lines:
    """Lines from bytes, however these are divided. What is kept of an unfinished line is bounded."""

    _rest: bytes = b""
    _too_long: bool = False  # whether the unfinished line has more than is kept
    _parts: dict[str, Line] = field(default_factory=dict)  # by stream: what came with the tag P

    def take(self, data: bytes) -> list[Line]:
        """Return the lines that are whole with these bytes."""
        found = []
        *ends, rest = data.split(b"\n")
        for end in ends:
            line, cut = self._rest + end, self._too_long
            self._rest, self._too_long = b"", False
            if (whole := self._joined(line, cut=cut)) is not None:
                found.append(whole)
        self._rest += rest
        if len(self._rest) > 2 * LINE_BYTES:
            self._rest, self._too_long = self._rest[: 2 * LINE_BYTES], True
        return found

    def _joined(self, written: bytes, *, cut: bool) -> Line | None:
        time, stream, tag, text = _fields(written)
        before = self._parts.pop(stream, None)
        whole = (before.text if before else "") + text
        kept = whole.encode("utf-8", "surrogatepass")[:LINE_BYTES].decode("utf-8", "ignore")
        cut = cut or len(kept) < len(whole) or (before is not None and before.cut)
        line = Line(kept, before.time if before else time, stream, cut)
        if tag.split(b":")[0] == b"P":
            self._parts[stream] = line
            return None
        return line


def _fields(written: bytes) -> tuple[float, str, bytes, str]:
    """Return time, stream, tags and text of a line of the file; a line of another form is its own text."""
    parts = written.split(b" ", 3)
    if len(parts) < 3 or parts[1] not in STREAMS or TIME.fullmatch(parts[0]) is None:
        return 0.0, "stdout", b"F", written.decode("utf-8", "replace")
    text = parts[3] if len(parts) == 4 else b""
    return _seconds(parts[0]), parts[1].decode(), parts[2], text.decode("utf-8", "replace")


def _seconds(time: bytes) -> float:
    """Return seconds since 1970 of a time as RFC 3339 with nanoseconds, 0 where it is none."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(time.decode()).timestamp()
    return 0.0


def _start_of(descriptor: int, count: int) -> int:
    """Return where the last `count` lines begin. No line is begun in its middle, within TAIL_BYTES."""
    end = start = os.fstat(descriptor).st_size
    first, seen = max(0, end - TAIL_BYTES), 0
    begins = end  # of the earliest line that is whole
    while start > first:
        size = min(READ_BYTES, start - first)
        start -= size
        data = os.pread(descriptor, size, start)
        place = len(data)
        while (place := data.rfind(b"\n", 0, place)) >= 0:
            if start + place + 1 < end:
                begins = start + place + 1
                seen += 1
                if seen >= count:
                    return begins
    return 0 if start == 0 else begins


def _newest(path: Path) -> Path:
    """Return the file of the newest start in the directory of `path`, or `path` itself if its name is not a number."""
    if not _is_number(path):
        return path
    try:
        found = [int(one.stem) for one in path.parent.glob("*.log") if _is_number(one)]
    except OSError:
        found = []
    return path.with_name(f"{max(found)}.log") if found else path


def _is_number(path: Path) -> bool:
    return path.suffix == ".log" and path.stem.isascii() and path.stem.isdigit() and len(path.stem) < 10


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except OSError as error:
        raise Missing(
            f"the log {path} cannot be opened: {error.strerror}",
            advice="its program has written nothing yet, or kubelet has removed its log",
        ) from error
