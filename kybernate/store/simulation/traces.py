"""Reads traces of uses: our own, as CSV or JSON lines, and two that are published of a large service.

| format | known by | content |
|---|---|---|
| CSV | a header with `time` and `workload` | a use a line; `size` in bytes, where there is one |
| JSON lines | a line that begins with `{` | an object with the same keys a line |
| Azure Functions 2019 | a header with `HashApp` | a day a file: invocations of each function in each minute |
| Azure Functions 2021 | a header with `end_timestamp` | an invocation a line: when it ended, and how long it took |

`time` is in seconds since 1970, or ISO 8601 (without an offset: UTC). In the published ones, a workload is an
application.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

DAY: Final = 86400.0  # seconds
FIRST_DAY: Final = datetime(
    2019, 7, 15, tzinfo=UTC
).timestamp()  # a Monday of the month of the trace, which names no day


@dataclass(frozen=True)
class Access:
    """A use of a workload's image: `time` in seconds since 1970, `size` in bytes."""

    time: float
    workload: str
    size: int


def read_traces(files: Iterable[Iterable[str]], *, size: int, idle: float = 0.0) -> list[Access]:
    """Return the uses of all files, in the order of time. `size` is that of images where a trace has none.

    A use within `idle` seconds of the workload's last one is left out: it runs still, and is not restored. Files of the
    published trace of 2019 are days, in the order of the files. Raises ValueError.
    """
    found = [access for day, lines in enumerate(files) for access in _read(lines, size, day)]
    return list(_restores(sorted(found, key=lambda one: (one.time, one.workload)), idle))


def _restores(accesses: Iterable[Access], idle: float) -> Iterator[Access]:
    last: dict[str, float] = {}
    for one in accesses:
        if one.time - last.get(one.workload, float("-inf")) > idle or not idle:
            yield one
        last[one.workload] = one.time


def _read(lines: Iterable[str], size: int, day: int) -> Iterator[Access]:
    rest = iter(lines)
    first = next(rest, "")
    if first.lstrip().startswith("{"):
        yield from _json_lines(chain([first], rest), size)
        return
    header = next(csv.reader([first]), [])
    rows = csv.reader(rest)
    if "HashApp" in header:
        yield from _minutes(header, rows, size, day)
    elif "end_timestamp" in header:
        yield from _invocations(header, rows, size)
    elif {"time", "workload"} <= {*header}:
        for number, row in enumerate(rows, 2):
            if row:
                yield _access(dict(zip(header, row, strict=False)), number, size)
    else:
        raise ValueError(
            f"line 1: a trace begins with a header, such as `time,workload,size`, not {first.strip()[:80]!r}"
        )


def _json_lines(lines: Iterable[str], size: int) -> Iterator[Access]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"line {number}: not an object: {line.strip()[:80]!r}")
        yield _access(found, number, size)


def _access(found: Mapping[str, Any], number: int, size: int) -> Access:
    try:
        access = Access(_time(found["time"]), str(found["workload"]), int(found.get("size") or size))
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"line {number}: needs `time`, `workload` and, if any, `size`: {dict(found)}") from error
    if access.size < 0 or not abs(access.time) < float("inf"):
        raise ValueError(f"line {number}: time and size are finite, and the size is not negative: {dict(found)}")
    return access


def _time(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # what is not a number is ISO 8601, or wrong
    except ValueError:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _minutes(header: list[str], rows: Iterable[list[str]], size: int, day: int) -> Iterator[Access]:
    """Yield a use for each minute in which an application was invoked: a line has 1440 counts, from column "1" on."""
    app, first = header.index("HashApp"), header.index("1")
    for row in rows:
        for minute, count in enumerate(row[first:]):
            if count not in ("", "0"):
                yield Access(FIRST_DAY + day * DAY + minute * 60.0, row[app][:16], size)


def _invocations(header: list[str], rows: Iterable[list[str]], size: int) -> Iterator[Access]:
    """Yield a use when an invocation began. Times of that trace begin at 0, a Sunday."""
    app, end, duration = (header.index(name) for name in ("app", "end_timestamp", "duration"))
    for number, row in enumerate(rows, 2):
        try:
            began = float(row[end]) - float(row[duration])
        except (ValueError, IndexError) as error:
            raise ValueError(f"line {number}: no time and duration: {row[:4]}") from error
        yield Access(FIRST_DAY - DAY + began, row[app][:16], size)
