"""A checkpoint image as one file: a tar archive of its flat files, the manifest first.

An archive from elsewhere is only unpacked here, into a directory of its own; what is in it is examined as any other
foreign image is. Written archives appear under their name when they are on the disk as a whole.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kybernate.node.failure import Failure
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME, Manifest, ManifestInvalid, decode, is_flat
from kybernate_shim.checkpoint.image.store import LOGS, Image, require_space
from kybernate_shim.checkpoint.rootfs.apply import DiffInvalid, Headers
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.atomic_write import creating
from kybernate_shim.linux.private_files import DIRECTORY_MODE, FILE_MODE, create_private

CHUNK = 4 << 20  # bytes
MOST_FILES = 100_000
Progress = Callable[[int, int], object]


class NotExported(Failure):
    """The archive could not be written. There is no file under its name."""


class ArchiveOdd(Failure):
    """The file is no archive of a checkpoint image."""

    advice = "make it with Export, or with tar from the files of an image's directory"


def export(image: Image, archive: Path, staging: Path, progress: Progress = lambda done, total: None) -> int:
    """Write the image to `archive` by way of `staging` in the same directory, and return the archive's bytes.

    Raises NotExported, and what `progress` raises; nothing is left then.
    """
    names = [NAME, *sorted(file.name for file in image.manifest.stored_files)]
    total = sum((image.path / name).stat().st_size for name in names)
    try:
        require_space(archive.parent, total)
        with (
            creating(archive, staging=staging) as out,
            tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            count = 0
            for name in names:
                with (image.path / name).open("rb") as file:
                    info = tar.gettarinfo(arcname=name, fileobj=file)
                    info.mode, info.uid, info.gid, info.uname, info.gname = FILE_MODE, 0, 0, "", ""
                    tar.addfile(info, _Counted(file, count, total, progress))
                    count += info.size
        return archive.stat().st_size
    except (OSError, NoRoom, tarfile.TarError) as error:
        raise NotExported(f"{image.path} cannot be exported to {archive}: {error}", state="nothing is left") from error


def manifest_in(archive: Path) -> tuple[Manifest, bytes]:
    """Return the manifest that an archive holds, and its bytes, without unpacking the rest. Raises ArchiveOdd."""
    try:
        with _opened(archive) as (tar, headers):
            for number, member in enumerate(tar):
                headers.next_entry()
                if member.name.removeprefix("./") == NAME and member.isreg() and member.size <= MOST_BYTES:
                    file = tar.extractfile(member)
                    assert file is not None
                    headers.in_content = True
                    content = file.read()
                    return decode(content), content
                if number > MOST_FILES:
                    break
    except (OSError, tarfile.TarError, ManifestInvalid, DiffInvalid, ValueError) as error:
        raise ArchiveOdd(f"{archive} cannot be read: {error}", state="nothing was imported") from error
    raise ArchiveOdd(f"{archive} has no {NAME}", state="nothing was imported")


def unpack(archive: Path, directory: Path, progress: Progress = lambda done, total: None) -> None:
    """Unpack an archive into `directory`, which is created. Raises ArchiveOdd and OSError; the rest is left then.

    The archive has plain files with plain names and nothing else, no name twice, and no more bytes than it says.
    """
    total = archive.stat().st_size
    require_space(directory.parent, total)
    directory.mkdir(mode=DIRECTORY_MODE)
    try:
        with _opened(archive) as (tar, headers):
            for number, member in enumerate(tar):
                headers.next_entry()
                name = member.name.removeprefix("./")
                if member.isdir() and name in ("", "."):
                    continue
                if number > MOST_FILES or not member.isreg() or member.issparse() or not is_flat(name):
                    raise ArchiveOdd(f"{archive}: {member.name!r} is no plain file of an image")
                if not name.endswith(LOGS):
                    headers.in_content = True
                    _unpack_member(tar, member, directory / name, lambda done: progress(done, total))
                    headers.next_entry()
    except (tarfile.TarError, DiffInvalid, ValueError, FileExistsError) as error:
        raise ArchiveOdd(f"{archive} cannot be unpacked: {error}", state="nothing was imported") from error


@contextmanager
def _opened(archive: Path) -> Iterator[tuple[tarfile.TarFile, Headers]]:
    """Open an archive of which a header may announce any length: names and attributes are bounded as they are read."""
    with (
        Headers(os.open(archive, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as headers,
        tarfile.open(fileobj=headers, mode="r:") as tar,
    ):
        yield tar, headers


def _unpack_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, progress: Callable[[int], object]
) -> None:
    source = tar.extractfile(member)
    assert source is not None
    with create_private(path, exclusive=True) as out:
        while piece := source.read(CHUNK):
            out.write(piece)
            progress(member.offset_data + out.tell())
    if path.stat().st_size != member.size:
        raise ArchiveOdd(f"{tar.name!r} ends in the middle of {member.name}", state="nothing was imported")


class _Counted:
    """A file that says how much of it was read."""

    def __init__(self, file: IO[bytes], before: int, total: int, progress: Progress) -> None:
        self._file, self._before, self._total, self._progress = file, before, total, progress

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._progress(self._before + self._file.tell(), self._total)
        return piece
