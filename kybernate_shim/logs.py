"""The daemon's log: JSON lines to containerd's `log` FIFO in the bundle, and to a file where one is configured.

Writing never blocks and never fails: a full FIFO or disk must not stop a container. Lines that the FIFO could not take
are counted and reported with the next one that it takes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kybernate_shim.imports import without
from kybernate_shim.linux.private_files import make_directory

if TYPE_CHECKING:
    import structlog

    Log = structlog.typing.FilteringBoundLogger
else:
    Log = Any


class LineWriter:
    """Writes whole lines to descriptors that may refuse them. Has the interface of a structlog logger."""

    def __init__(self, *fds: int) -> None:
        self._fds = fds
        self._lost = dict.fromkeys(fds, 0)
        self._torn: set[int] = set()

    def msg(self, line: str) -> None:
        for fd in self._fds:
            self._write(fd, line)

    debug = info = warning = error = critical = msg

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
    structlog = load_structlog()
    fds = [fd for fd in (_open_fifo(fifo), _open_file(file)) if fd is not None]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: LineWriter(*fds),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger()
    return log.bind(**fields)


def load_structlog() -> ModuleType:
    """Import structlog and return it, without rich, which it imports eagerly for a console that the shim does not have.

    With it, the import takes four times as long, and every daemon shares a few MiB more.
    """
    with without("rich"):
        import structlog

        return structlog


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
