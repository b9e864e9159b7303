"""Replaces a file's content in one step, so that no reader ever gets half of it."""

from __future__ import annotations

import os
from _thread import get_native_id  # `threading` would be one more import for each `start`
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from kybernate_shim.linux.private_files import FILE_MODE, create_private

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def replacing(
    path: Path, *, mode: int = FILE_MODE, durable: bool = False, keep: bool = False, staging: str = ""
) -> Iterator[TextIO]:
    """Yield a new file that replaces `path` at the end. After a failure, all is as it was. Raises OSError.

    With `durable`, the file survives a power failure once this returns, and before that the old one does. With `keep`,
    a file that is at `path` by then stays instead. `staging` names the new file until then. It is for callers that must
    not leave the file of a killed process next to the new one. Without it, no two threads on the node use the same
    name.
    """
    temporary = path.with_name(staging or f".{path.name}.{get_native_id()}")
    try:
        with os.fdopen(_create(temporary, mode), "w") as stream:
            os.fchmod(stream.fileno(), mode)  # whatever the umask is
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())  # before the rename: else the name may survive without the content
        if keep:
            _link(temporary, path)
        else:
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def replace_file(
    path: Path,
    content: str | bytes,
    *,
    mode: int = FILE_MODE,
    durable: bool = False,
    keep: bool = False,
    staging: str = "",
) -> None:
    """Make `content` all that is in the file `path`, as `replacing` does. Raises OSError."""
    with replacing(path, mode=mode, durable=durable, keep=keep, staging=staging) as stream:
        stream.buffer.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def creating(path: Path, *, staging: Path) -> Iterator[BinaryIO]:
    """Yield a new file that appears as `path` at the end, durably. After a failure, nothing is there.

    It is `staging` until then, in the same directory. Raises FileExistsError where either is there, and OSError.
    """
    stream = create_private(staging, exclusive=True)
    try:
        with stream:
            yield stream
        sync(staging)
        os.link(staging, path)  # fails where something is there by now
    finally:
        staging.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(path: Path, mode: int) -> int:
    try:
        return os.open(path, _NEW, mode)
    except FileExistsError:  # a killed process left it; it may be a second name of what that has written
        path.unlink()
        return os.open(path, _NEW, mode)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
