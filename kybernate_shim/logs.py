"""The daemon's log: JSON lines to containerd's `log` FIFO in the bundle, and to a file where one is configured.

Writing never blocks and never fails: a full FIFO or disk must not stop a container. Lines that the FIFO could not take
are counted and reported with the next one that it takes.

It needs no library, since a daemon starts for each pod, and the CUDA helper runs on nodes without the agent. The lines
of the agent (`kybernate.logs`) have the same form; a test compares them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kybernate_shim.linux.private_files import make_directory


class Log:
    """Has `write` write each event that is at least of `level` as a line of JSON, with `fields` in all of them."""

    def __init__(self, write: Callable[[str], object], level: int, fields: dict[str, Any]) -> None:
        self._write = write
        self._level = level
        self._fields = fields

    def bind(self, **fields: Any) -> Log:
        """Return a log that has these fields as well."""
        return Log(self._write, self._level, {**self._fields, **fields})

    def log(self, level: int, event: str, /, *, exc_info: Any = None, **fields: Any) -> None:
        """Write an event of this level; `exc_info` is as for the standard library's logging."""
        if level < self._level:
            return
        line = {**self._fields, **fields}
        if exc_info:
            line["exception"] = _described(exc_info)
        time = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
        line |= {"event": event, "level": logging.getLevelName(level).lower(), "time": f"{time}Z"}
        self._write(json.dumps(line, default=str))

    def debug(self, event: str, /, **fields: Any) -> None:
        self.log(logging.DEBUG, event, **fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self.log(logging.INFO, event, **fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self.log(logging.WARNING, event, **fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self.log(logging.ERROR, event, **fields)


class LineWriter:
    """Writes whole lines to descriptors that may refuse them."""

    def __init__(self, *fds: int) -> None:
        self._fds = fds
        self._lost = dict.fromkeys(fds, 0)
        self._torn: set[int] = set()

    def write(self, line: str) -> None:
        for fd in self._fds:
            self._write(fd, line)

    def _write(self, fd: int, line: str) -> None:
        data = line.encode() + b"\n"
        if lost := self._lost[fd]:
            end_of_torn = b"\n" if fd in self._torn else b""
            data = b'%s{"event": "log.lost", "lines": %d}\n%s' % (end_of_torn, lost, data)
        try:
            written = os.write(fd, data)
        except OSError:
            self._lost[fd] += 1
            return
        self._lost[fd] = 0
        self._torn.discard(fd)
        if written < len(data):  # a pipe takes only what fits a page as a whole
            self._lost[fd] = 1
            self._torn.add(fd)


def open_log(fifo: Path, file: Path | None, *, level: str, **fields: Any) -> Log:
    """Return the daemon's logger; `fields` go into every line. `level` is the least severe one that is written.

    The FIFO is kept open for life: after containerd's restart a new reader appears at its other end.
    """
    fds = [fd for fd in (_open_fifo(fifo), _open_file(file)) if fd is not None]
    return Log(LineWriter(*fds).write, number_of(level), fields)


def number_of(level: str) -> int:
    """Return the standard library's number for a level's name."""
    return logging.getLevelNamesMapping()[level.upper()]


def _described(exc_info: Any) -> str:
    if isinstance(exc_info, tuple):
        error = exc_info[1]
    else:
        error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
    return "".join(traceback.format_exception(error)).rstrip()


def _open_fifo(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None  # no reader: started by hand


def _open_file(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        make_directory(path.parent)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None  # the FIFO still carries the line
