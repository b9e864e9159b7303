"""The log of the long-running programs: structlog, set up here and nowhere else.

    log = open_log("info")
    log.info("operation.ended", operation=id, seconds=1.2)
    context = with_ids(operation=id)        # of a task: each line that it logs has the id
    asyncio.create_task(work, context=context)

On a node, each event is a line of JSON on stderr, which systemd keeps, with the keys and the form of the lines
of shims and of the CUDA helper (`kybernate_shim.logs`). On a terminal, it is a line for people. What libraries log by
the standard library comes out in the same form. Writing never waits and never fails: a full pipe costs lines, and they
are counted.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TypeAlias

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from kybernate_shim.logs import LineWriter, number_of

Log: TypeAlias = FilteringBoundLogger
TIME: Final = structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")
COMMON: Final = ("exception", "event", "level", "time")
LIBRARIES: Final = logging.WARNING  # the least severe that is taken of what libraries log


def open_log(level: str, *, fd: int | None = None) -> Log:
    """Return the program's logger, whose least severe lines are of `level`; stderr where no `fd` is given.

    The ids of `with_ids` are in each line. Replaces what was set up before.
    """
    number, descriptor = number_of(level), sys.stderr.fileno() if fd is None else fd
    sink = _Lines(LineWriter(descriptor))
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *_form(os.isatty(descriptor))],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: sink,
        cache_logger_on_first_use=False,
    )
    log: Log = structlog.get_logger()
    logging.basicConfig(handlers=[_Libraries(log)], level=max(number, LIBRARIES), force=True)
    return log


def with_ids(**ids: str) -> contextvars.Context:
    """Return a copy of the current context whose lines have these ids, for a task that is about one thing."""
    context = contextvars.copy_context()
    context.run(add_ids, **ids)
    return context


def add_ids(**ids: str) -> None:
    """Have each further line of this task have these ids."""
    structlog.contextvars.bind_contextvars(**{name: value for name, value in ids.items() if value})


def _form(terminal: bool) -> list[Processor]:
    """Return what turns an event into a line: text on a terminal, JSON elsewhere."""
    if terminal:
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False, key="time")
        return [
            structlog.processors.add_log_level,
            stamp,
            structlog.dev.ConsoleRenderer(timestamp_key="time", colors=True, pad_event_to=0),
        ]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.add_log_level,
        TIME,
        _last,
        structlog.processors.JSONRenderer(serializer=json.dumps, default=str),
    ]


def _last(log: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Put the keys that every line has behind the event's own, as the shims' lines have them."""
    common = {name: event.pop(name) for name in COMMON if name in event}
    return {**event, **common}


class _Lines:
    """What structlog hands its finished lines to."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        self._writer.write(line)

    debug = info = warning = warn = error = critical = exception = log = msg


class _Libraries(logging.Handler):
    """Passes on what the standard library's logging gets."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._log.log(record.levelno, record.getMessage(), **fields)
