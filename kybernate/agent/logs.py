"""The agent's log: JSON lines to stderr, which systemd keeps; what libraries log comes out in the same form."""

from __future__ import annotations

import logging
import sys
from typing import Any

from kybernate_shim.logs import LineWriter, load_structlog


def open_log(level: str, *, fd: int | None = None) -> Any:
    """Return the agent's logger, whose least severe lines are of `level`; stderr where no `fd` is given."""
    structlog = load_structlog()
    writer = LineWriter(sys.stderr.fileno() if fd is None else fd)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=True,
    )
    log = structlog.get_logger()
    logging.basicConfig(handlers=[_Handler(log)], level=max(number, logging.WARNING), force=True)
    return log


class _Handler(logging.Handler):
    """Passes on what the standard library's logging gets."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._log.log(record.levelno, record.getMessage(), **fields)
