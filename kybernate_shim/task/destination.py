"""Where a client wants a process's output: the parsed strings of Create and Exec.

containerd sends the path of a FIFO, nothing, or a URI whose scheme names another way to keep logs. Pure functions: what
a string means is decided here, files are opened elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kybernate_shim.errors import Invalid

STDOUT, STDERR = 1, 2
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_QUOTED = re.compile(rb"%([0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class Destination:
    """A place for output. `kind` is "path" (it exists: a FIFO, a file), "file" (created on demand) or "binary".

    `arguments` are those of the logger program of a "binary".
    """

    kind: str
    path: str
    arguments: tuple[str, ...] = ()


def parse(text: str) -> Destination | None:
    """Return what `text` names, None for the empty string.

    A string that starts with "/" is a path as it stands, "%" and "?" included. Raises Invalid.
    """
    if not text:
        return None
    if text.startswith("/"):
        return Destination("path", _without_nul(text, text))
    match = _SCHEME.match(text)
    if not match:
        raise Invalid(f"{text!r} is neither an absolute path nor a URI")
    kind = {"fifo": "path", "file": "file", "binary": "binary"}.get(match[1].lower())
    if kind is None:
        raise Invalid(f"{text!r}: scheme {match[1]} is not one of fifo, file, binary")
    location, _, query = text[match.end() :].partition("#")[0].partition("?")
    arguments = tuple(_arguments(query, text)) if kind == "binary" else ()
    return Destination(kind, _path(location, text), arguments)


def plan_outputs(stdout: str, stderr: str, *, terminal: bool) -> dict[int, Destination]:
    """Return the destination of each output stream that has one; the others are discarded.

    stdout decides: a file or a logger program takes stderr as well. A terminal has one stream, which goes to stdout.
    """
    first = parse(stdout)
    second = None if terminal else parse(stderr)
    if first and first.kind in ("file", "binary") and not terminal:
        second = first
    elif second and second.kind == "binary":
        raise Invalid(f"{stderr!r}: a logger program takes both streams, so it is named by stdout")
    return {number: found for number, found in ((STDOUT, first), (STDERR, second)) if found}


def _path(location: str, text: str) -> str:
    if location.startswith("//"):
        host, slash, rest = location[2:].partition("/")
        if host:
            raise Invalid(f"{text!r}: the path is not absolute; three slashes follow the scheme")
        location = slash + rest
    path = _decoded(location)
    if not path.startswith("/"):
        raise Invalid(f"{text!r}: the path is not absolute")
    return _without_nul(path, text)


def _arguments(query: str, text: str) -> Iterator[str]:
    """Yield each key and its first value, in order of appearance."""
    first: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        key, _, value = pair.replace("+", " ").partition("=")
        first.setdefault(_decoded(key), _decoded(value))
    for key_and_value in first.items():
        for word in key_and_value:
            yield _without_nul(word, text)


def _decoded(text: str) -> str:
    """Resolve what is quoted by percent signs, as urllib.parse does, whose import would cost every daemon 400 KiB."""
    return os.fsdecode(_QUOTED.sub(lambda match: bytes.fromhex(match[1].decode()), os.fsencode(text)))


def _without_nul(word: str, text: str) -> str:
    if "\0" in word:
        raise Invalid(f"{text!r} contains a NUL byte")
    return word
