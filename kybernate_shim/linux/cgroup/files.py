"""The formats of cgroup files, read with few system calls. A file that is not there reads as None.

Which files exist depends on the kernel's version and configuration and on the enabled controllers, so a missing one is
never an error here. Source: the kernel's admin guide, "Control Group v2" and "Control Groups version 1".
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.message import Message

UNLIMITED = 2**64 - 1
ABSENT = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.EINVAL)
CHUNK = 64 * 1024


class Directory:
    """A cgroup's directory, opened once; a context manager. Raises FileNotFoundError when the cgroup is gone."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        return os.listdir(self._fd)  # noqa: PTH208  # pathlib takes no descriptor

    def text(self, name: str) -> str | None:
        """Return the file's content, None where the kernel has no such file."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            _must_mean_absence(error)
            return None
        try:
            content = bytearray()
            while chunk := os.read(fd, CHUNK):
                content += chunk
            return content.decode(errors="replace")
        except OSError as error:
            _must_mean_absence(error)
            return None
        finally:
            os.close(fd)

    def number(self, name: str) -> int | None:
        """Return the number in a file of one value; the word "max" is UNLIMITED."""
        text = self.text(name)
        return None if text is None else number(text)

    def table(self, name: str) -> dict[str, int]:
        """Return a file of "key value" lines, empty where there is no such file."""
        return parse_table(self.text(name) or "")


def number(text: str) -> int | None:
    """Parse an unsigned number; "max" is UNLIMITED. Returns None for anything else."""
    text = text.strip()
    if text == "max":
        return UNLIMITED
    return int(text) if text.isascii() and text.isdecimal() else None


def parse_table(text: str) -> dict[str, int]:
    """Parse "key value" lines; lines of another form are left out."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: value for row in rows if len(row) == 2 and (value := number(row[1])) is not None}


def pairs(words: list[str]) -> dict[str, str]:
    """Parse words of the form key=value."""
    return {key: value for key, equals, value in (word.partition("=") for word in words) if equals}


def fill(message: Message, values: dict[str, int]) -> None:
    """Set those number fields of `message` that `values` names; other names are ignored."""
    known = message.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        if name in known and known[name].message_type is None:
            setattr(message, name, min(value, UNLIMITED))


def hugepage_sizes(names: list[str], suffix: str) -> Iterator[str]:
    """Yield "2MB" for hugetlb.2MB<suffix>, in the order of the names."""
    for name in sorted(names):
        if name.startswith("hugetlb.") and name.endswith(suffix):
            size = name.removeprefix("hugetlb.").removesuffix(suffix)
            if "." not in size:  # hugetlb.2MB.rsvd.… counts reservations
                yield size


def rdma_rows(text: str | None) -> Iterator[tuple[str, int, int]]:
    """Yield device, handles and objects of rdma.current or rdma.max; "max" is the greatest 32-bit number."""
    for line in (text or "").splitlines():
        device, *words = line.split()
        limits = {key: min(number(value) or 0, 2**32 - 1) for key, value in pairs(words).items()}
        yield device, limits.get("hca_handle", 0), limits.get("hca_object", 0)


def _must_mean_absence(error: OSError) -> None:
    if error.errno not in ABSENT:
        raise error
