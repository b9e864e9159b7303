"""Files and directories that no other user can open, whatever the umask of the process is.

A daemon keeps the umask that containerd gave it, because the containers that it starts inherit it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
NO_OTHERS = 0o077  # as a umask
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def create_private(path: Path, *, exclusive: bool = False) -> BinaryIO:
    """Open a file of mode 0600 for writing, emptied if it exists. A link is not followed. Raises OSError.

    With `exclusive`, a file that exists is an error.
    """
    fd = os.open(path, _NEW | (os.O_EXCL if exclusive else os.O_TRUNC), FILE_MODE)
    if not exclusive:
        os.fchmod(fd, FILE_MODE)  # an older file may have another mode
    return os.fdopen(fd, "wb")


def write_private(path: Path, content: str | bytes) -> None:
    """Write the whole content of a file of mode 0600. Raises OSError."""
    with create_private(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def copy_private(source: Path, target: Path) -> None:
    """Copy a file's content into one of mode 0600. Raises OSError."""
    import shutil  # here, because the first container of a node waits for every import

    with source.open("rb") as reading, create_private(target) as writing:
        shutil.copyfileobj(reading, writing)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, each of mode 0700. One that exists stays as it is. Raises OSError."""
    missing = [path]
    while not missing[-1].exists() and missing[-1].parent != missing[-1]:
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        one.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def close_files(directory: Path) -> None:
    """Give the files in a directory that other programs have written the mode 0600. Raises OSError."""
    for path in directory.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(FILE_MODE)
