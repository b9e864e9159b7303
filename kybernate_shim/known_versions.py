"""Versions of programs that are not ours, asked once for each program file and boot of the node.

A process of ours lives as long as one pod, or one call, so what it knows must outlive it: each would wait for other
programs to start otherwise. A version is kept in a file whose name is made from what identifies a program file, so that
an upgrade is noticed without a cleanup.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.run_directory import RUN

KNOWN: Final = RUN / "versions"


def record_of(name: str, program: str, known: Path = KNOWN) -> Path:
    """Return the file for the version of `program`, called `name`: one for no other program, nor for a changed one.

    Raises OSError where there is no such program.
    """
    status = Path(program).stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return known / ".".join([name, *(f"{number:x}" for number in numbers)])


def known_version(record: Path) -> str | None:
    """Return the version that was kept, None without one."""
    try:
        return record.read_text()
    except OSError:
        return None


def keep_version(record: Path, version: str) -> None:
    """Keep a version for the next process. It is no error where that cannot be: the program is asked again."""
    with suppress(OSError):
        make_directory(record.parent)
        replace_file(record, version)
