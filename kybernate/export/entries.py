"""What an exported image holds, in the layout of CRI's checkpoint archives, which containerd and `checkpointctl` read.

The files of the image lie below `checkpoint/`, the manifest first. What lies above is written for other programs; a
pull ignores it, because no signature covers it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kybernate.export.cri_documents import config_dump, spec_dump, stats_dump, status_dump, status_file
from kybernate.node.failure import Failure
from kybernate.node.reading import StreamDigest, digest_for, opened, opened_directory, pieces_of
from kybernate_shim.checkpoint.image.digests import FileUnreadable
from kybernate_shim.checkpoint.image.manifest import NAME, SAVED_SPEC, File
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.vram_io.errors import VramError

FOLDER = "checkpoint"  # of the image's own files, as CRI's archives have it
MOST_SPEC = 4 << 20  # bytes of a container's configuration
WHITEOUT = ".wh."  # begins the names by which a layer deletes files


@dataclass(frozen=True)
class Entry:
    """One member of an archive: a directory, bytes, or a file of the image at `path`.

    `listed` is the file as the manifest has it, where its digest is of the bytes on the disk.
    """

    name: str
    size: int = 0
    content: bytes | None = None
    path: Path | None = None
    listed: File | None = None

    @property
    def is_directory(self) -> bool:
        return self.content is None and self.path is None

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the content; a file is compared with its digest. Raises Failure where it is not as listed."""
        if self.path is not None:
            yield from _read(self.path, self.size, self.listed)
        elif self.content:
            yield self.content


def described(image: Image) -> tuple[Entry, ...]:
    """Return what describes the image: the documents for other programs, and its manifest."""
    manifest, spec = image.manifest, _spec(image)
    documents = {
        "config.dump": config_dump(manifest),
        "spec.dump": spec_dump(manifest, spec),
        "stats-dump": stats_dump(manifest),
        "status": status_file(manifest),
        "status.dump": status_dump(manifest),
    }
    above = (Entry(name, len(content), content) for name, content in documents.items())
    return (*above, Entry(FOLDER), Entry(f"{FOLDER}/{NAME}", len(image.content), image.content))


def payload(image: Image) -> tuple[Entry, ...]:
    """Return the files of the image, sorted by name. Raises Failure where a layer cannot carry one."""
    plain = image.manifest.encryption is None
    files = zip(image.manifest.files, image.manifest.stored_files, strict=True)
    entries = [_file(image.path, stored, listed if plain else None) for listed, stored in files]
    return tuple(sorted(entries, key=lambda one: one.name))


def rootfs_diff(image: Image) -> tuple[Entry, ...]:
    """Return the root filesystem's changes where other programs look for them; none of an encrypted image."""
    found = [file for file in image.manifest.stored_files if file.name == ROOTFS_DIFF]
    return tuple(Entry("rootfs-diff.tar", file.size, path=image.path / file.name, listed=file) for file in found)


def _file(directory: Path, stored: File, listed: File | None) -> Entry:
    if stored.name.startswith(WHITEOUT):
        raise Failure(f"{directory}: {stored.name} has a name that a layer cannot carry", state="nothing was written")
    return Entry(f"{FOLDER}/{stored.name}", stored.size, path=directory / stored.name, listed=listed)


def _spec(image: Image) -> bytes | None:
    """Return the configuration of the container, None where the image has none, or has it encrypted."""
    found = [file for file in image.manifest.stored_files if file.name == SAVED_SPEC]
    if not found or found[0].size > MOST_SPEC:
        return None
    try:
        return read_plain(image.path / SAVED_SPEC, most=MOST_SPEC)
    except OSError as error:
        raise Failure(f"{image.path / SAVED_SPEC} cannot be read: {error.strerror}") from error


def _read(path: Path, size: int, listed: File | None) -> Iterator[memoryview]:
    try:
        digest = digest_for(listed) if listed else None
        with opened_directory(path.parent) as directory, opened(path.name, directory) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for piece in pieces_of(fd, path.name, size):
                if digest:
                    digest.update(piece)
                yield piece
        _require_listed(path, listed, digest)
    except (FileUnreadable, VramError) as error:
        raise _changed(path, error) from error
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}", state="nothing was written") from error


def _require_listed(path: Path, listed: File | None, digest: StreamDigest | None) -> None:
    if listed and digest and digest.text() != listed.digest:
        raise _changed(path, f"its digest is not {listed.digest}")


def _changed(path: Path, why: object) -> Failure:
    return Failure(
        f"{path} is not as the manifest lists it: {why}",
        state="nothing was written",
        advice="`kybernate inspect --verify` compares all files of the image",
    )
