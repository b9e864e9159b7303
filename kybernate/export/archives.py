"""A checkpoint image as one file: a tar archive of its flat files, the manifest first.

An archive from elsewhere is only unpacked here, into a directory of its own; what is in it is examined as any other
foreign image is. Written archives appear under their name when they are on the disk as a whole.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from kybernate.export.documents import ArtefactInvalid
from kybernate.export.tar_stream import Member, members
from kybernate.node.failure import Failure
from kybernate.node.reading import OnProgress
from kybernate_shim.checkpoint.image.manifest import MOST_BYTES, NAME, Manifest, ManifestInvalid, decode, is_flat
from kybernate_shim.checkpoint.image.store import LOGS, Image, require_space
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.atomic_write import creating
from kybernate_shim.linux.private_files import DIRECTORY_MODE, FILE_MODE, create_private

CHUNK = 4 << 20  # bytes
MOST_FILES = 100_000


ARCHIVE_ODD_ADVICE: Final = "make it with Export, or with tar from the files of an image's directory"


def export(image: Image, archive: Path, staging: Path, progress: OnProgress = lambda done, total: None) -> int:
    """Write the image to `archive` by way of `staging` in the same directory, and return the archive's bytes.

    Raises Failure, and what `progress` raises; nothing is left then.
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
        raise Failure(f"{image.path} cannot be exported to {archive}: {error}", state="nothing is left") from error


def manifest_in(archive: Path) -> tuple[Manifest, bytes]:
    """Return the manifest that an archive holds, and its bytes, without unpacking the rest. Raises Failure."""
    try:
        with archive.open("rb") as file:
            for member in _members(file):
                if member.name == NAME and not member.is_directory and member.size <= MOST_BYTES:
                    content = file.read(member.size)
                    return decode(content), content
                file.seek(member.size, os.SEEK_CUR)
    except (OSError, ArtefactInvalid, ManifestInvalid) as error:
        raise Failure(
            f"{archive} cannot be read: {error}", state="nothing was imported", advice=ARCHIVE_ODD_ADVICE
        ) from error
    raise Failure(f"{archive} has no {NAME}", state="nothing was imported", advice=ARCHIVE_ODD_ADVICE)


def unpack(archive: Path, directory: Path, progress: OnProgress = lambda done, total: None) -> None:
    """Unpack an archive into `directory`, which is created. Raises Failure and OSError; the rest is left then.

    The archive has plain files with plain names and nothing else, no name twice, and no more bytes than it says.
    """
    total = archive.stat().st_size
    require_space(directory.parent, total)
    directory.mkdir(mode=DIRECTORY_MODE)
    try:
        with archive.open("rb") as file:
            for member in _members(file):
                if member.is_directory and member.name in ("", "."):
                    continue
                if member.is_directory or not is_flat(member.name):
                    raise ArtefactInvalid(f"{member.name!r} is not a plain file of an image")
                if member.name.endswith(LOGS):
                    file.seek(member.size, os.SEEK_CUR)
                else:
                    _unpack_member(file, member, directory / member.name, lambda done: progress(done, total))
    except (ArtefactInvalid, FileExistsError) as error:
        raise Failure(
            f"{archive} cannot be unpacked: {error}", state="nothing was imported", advice=ARCHIVE_ODD_ADVICE
        ) from error


def _members(file: IO[bytes]) -> Iterator[Member]:
    """Yield the members of an archive, of which no header is believed. Raises ArtefactInvalid."""

    def read(size: int) -> bytes:
        found = file.read(size)
        if found and len(found) < size:
            raise ArtefactInvalid("it ends in the middle of a member")
        return found

    for number, member in enumerate(members(read)):
        if number > MOST_FILES:
            raise ArtefactInvalid(f"more than {MOST_FILES} files")
        yield member


def _unpack_member(file: IO[bytes], member: Member, path: Path, progress: Callable[[int], object]) -> None:
    left = member.size
    with create_private(path, exclusive=True) as out:
        while left:
            piece = file.read(min(CHUNK, left))
            if not piece:
                raise ArtefactInvalid(f"it ends in the middle of {member.name}")
            out.write(piece)
            left -= len(piece)
            progress(file.tell())


class _Counted:
    """A file that says how much of it was read."""

    def __init__(self, file: IO[bytes], before: int, total: int, progress: OnProgress) -> None:
        self._file, self._before, self._total, self._progress = file, before, total, progress

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._progress(self._before + self._file.tell(), self._total)
        return piece
