"""What commands print: columns as `kubectl` prints them, fields, JSON; sizes and durations that people can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

INDENT = "  "
GAP = "   "


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print a text, whole, whatever the terminal's encoding cannot show."""
    stream = sys.stderr if err else sys.stdout
    try:
        stream.write(text + end)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding) + end)
    stream.flush()


def show_json(document: object) -> None:
    """Print a document for programs."""
    echo(json_of(document, indent=2))


def json_of(document: object, indent: int | None = None) -> str:
    """Return JSON for people, with its letters as they are, unless some cannot be encoded: then all are escaped."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    return text if text.isascii() or _is_text(text) else json.dumps(document, indent=indent)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show_columns(header: Sequence[str], rows: Iterable[Sequence[object]], *, indent: str = "") -> None:
    """Print a table; no cell is ever cut, because the output may be piped."""
    lines = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        padded = GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        echo(f"{indent}{padded}".rstrip())


def show_fields(fields: Mapping[str, object]) -> None:
    """Print one field a line; those that are empty are left out."""
    shown = {name: printable(str(value)) for name, value in fields.items() if value not in ("", None)}
    width = max(map(len, shown), default=0) + 1
    for name, value in shown.items():
        echo(f"{name + ':':{width}} {value}")


def printable(text: str, *, keep: str = "") -> str:
    """Return the text with every character escaped that a terminal would act on, except those in `keep`.

    Names of processes, mounts and pods are their authors' choice: one could move the cursor, and change the line above.
    """
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in keep else _escaped(mark) for mark in text)


def _escaped(mark: str) -> str:
    return mark.encode("unicode_escape", errors="surrogatepass").decode("ascii")


def age(seconds: float) -> str:
    """Return how long ago something was, in one unit as `kubectl` has it: 40s, 12m, 5h, 3d; 0s for the future."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"


def size(count: int) -> str:
    """Return a number of bytes in binary units, with three digits at least: 1023 B, 1.50 MiB, 14.2 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def seconds(value: float) -> str:
    """Return a duration: 87 ms, 1.32 s, 4 min 05 s."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.2f} s"
    return f"{int(value) // 60} min {int(value) % 60:02} s"


def moment(stamp: Timestamp) -> float:
    """Return a time of a message in seconds since 1970, 0 where it has none."""
    return stamp.ToMicroseconds() / 1e6
