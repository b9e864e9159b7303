"""The kernel's files as text, such as those in /proc, and the form in which they can be sent.

A program chooses names that the kernel shows there: of threads, mapped files, sockets, cgroups. They are any bytes.
What is not UTF-8 becomes surrogates, as in names of files everywhere in Python, and so remains usable as a file's name.

A line ends with a newline and nothing else: the kernel escapes or refuses that in names, but not the other characters
at which `str.splitlines` ends a line: with them, a program could forge lines in these files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a file of the kernel's as text. Raises OSError."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # some are read for thousands of processes
        return file.readall().decode(errors="surrogateescape")


def lines_of(text: str) -> list[str]:
    """Return the lines of such a text."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def each_line(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a kernel's file, without their ends, one at a time: a process may have a million mappings,
    each with a path of 4 KiB. Raises OSError.
    """
    with open(path, "rb") as file:  # noqa: PTH123
        for line in file:
            yield line.rstrip(b"\n").decode(errors="surrogateescape")


def plain(text: str) -> str:
    """Return a text that can be sent, which surrogates cannot: bytes that are not UTF-8 are shown as numbers."""
    return text.encode(errors="backslashreplace").decode()
