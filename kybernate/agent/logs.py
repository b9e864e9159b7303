"""The agent's log: JSON lines to stderr, which systemd keeps; what libraries log comes out in the same form."""

from __future__ import annotations

import logging
import sys
from typing import Any

from kybernate_shim.logs import LineWriter, Log, number_of


def open_log(level: str, *, fd: int | None = None) -> Log:
    """Return the agent's logger, whose least severe lines are of `level`; stderr where no `fd` is given."""
    number = number_of(level)
    log = Log(LineWriter(sys.stderr.fileno() if fd is None else fd).write, number, {})
    logging.basicConfig(handlers=[_Handler(log)], level=max(number, logging.WARNING), force=True)
    return log


class _Handler(logging.Handler):
    """Passes on what the standard library's logging gets."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._log.log(record.levelno, record.getMessage(), **fields)
