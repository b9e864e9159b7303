"""Where an exported image is read from: an image registry, an OCI layout, a CRI checkpoint archive. One interface.

A layout's and an archive's files are opened once, and read where their names, which are compared with patterns, say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Protocol

from kybernate.export.documents import LAYER, MOST_DOCUMENT, TITLE, ArtefactInvalid, Descriptor, chosen, read_manifest
from kybernate.export.download import blob
from kybernate.export.entries import FOLDER
from kybernate.export.registry_client import ImageRegistryClient
from kybernate.export.tar_stream import BLOCK, END, header, members
from kybernate.export.unpack import Unpacking, decompressed, verified
from kybernate_shim.checkpoint.image.manifest import NAME, Manifest
from kybernate_shim.checkpoint.image.store import LOGS
from kybernate_shim.linux.plain_files import open_plain

PIECE = 1 << 20
MOST_MEMBERS = 200_000
MANIFEST = f"{FOLDER}/{NAME}"
ROOTFS = "rootfs-diff.tar"  # of CRI's archives: the layer of the container's changed files
GZIP = b"\x1f\x8b"
BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}")


@dataclass(frozen=True)
class Origin:
    """What a source says of its image: the name that it had, "" for none, and its digest in OCI's words."""

    name: str = ""
    digest: str = ""


class Source(Protocol):
    """Gives the layers of one image."""

    def fill(self, unpacking: Unpacking) -> Origin:
        """Unpack the image. Raises ArtefactInvalid, NoRoom, OSError, and what an image registry raises."""


@dataclass(frozen=True)
class ImageRegistrySource:
    """An image of an image registry."""

    client: ImageRegistryClient

    def fill(self, unpacking: Unpacking) -> Origin:
        """See Source."""
        content, digest = self.client.manifest(self.client.reference.target)
        if inner := chosen(content):
            content, digest = self.client.manifest(inner.digest)
        return _filled(unpacking, content, digest, partial(blob, self.client))


def _filled(unpacking: Unpacking, content: bytes, digest: str, blob: Callable[[Descriptor], Iterator[bytes]]) -> Origin:
    manifest = read_manifest(content)
    for layer in manifest.layers:
        unpacking.layer(blob(layer), layer)
    return Origin(manifest.annotations.get(TITLE, ""), digest)


class Files(Protocol):
    """The files of a layout."""

    def opened(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises ArtefactInvalid where there is none."""


@dataclass(frozen=True)
class LayoutSource:
    """An image of an OCI layout."""

    files: Files

    def fill(self, unpacking: Unpacking) -> Origin:
        """See Source."""
        found = chosen(_small(self.files.opened("index.json")))
        if found is None:
            raise ArtefactInvalid("the layout has no index")
        content = _small(verified(self._blob(found), found))
        return _filled(unpacking, content, found.digest, self._blob)

    def _blob(self, descriptor: Descriptor) -> Iterator[bytes]:
        return self.files.opened(f"blobs/{descriptor.digest.replace(':', '/')}")


@dataclass(frozen=True)
class TarFiles:
    """The files of a tar, by where each of them is in the stream."""

    path: Path
    stream: IO[bytes]
    members: Mapping[str, tuple[int, int]]

    def opened(self, name: str) -> Iterator[bytes]:
        if name not in self.members:
            raise ArtefactInvalid(f"{self.path} has no {name}")
        start, left = self.members[name]
        self.stream.seek(start)
        while left:
            piece = self.stream.read(min(PIECE, left))
            if not piece:
                raise ArtefactInvalid(f"{self.path} ends in the middle of {name}")
            left -= len(piece)
            yield piece


@dataclass(frozen=True)
class ArchiveSource:
    """A CRI checkpoint archive, which has no digest of its own: an export's, the kubelet's, or that of `crictl`.

    CRI writes the files in the order of their names, and not the manifest first. It saves the container's changed files
    itself, compressed and next to the image: they become the image's own, whose signature does not cover them.
    """

    files: TarFiles

    def fill(self, unpacking: Unpacking) -> Origin:
        """See Source."""
        unpacking.archive(self._image())
        if unpacking.manifest is not None and self._has_more(unpacking.manifest):
            unpacking.add_rootfs_diff(_unpacked_diff(self.files.opened(ROOTFS)))
        return Origin()

    def _has_more(self, manifest: Manifest) -> bool:
        return ROOTFS in self.files.members and not manifest.rootfs_diff

    def _image(self) -> Iterator[bytes]:
        """Yield an archive of the image's files alone, its manifest first; logs are left out, as by an export."""
        self._require_image()
        own = (name for name in self.files.members if name.startswith(f"{FOLDER}/") and not name.endswith(LOGS))
        for name in (MANIFEST, *(name for name in own if name != MANIFEST)):
            size = self.files.members[name][1]
            yield header(name, size)
            yield from self.files.opened(name)
            yield bytes(-size % BLOCK)
        yield END

    def _require_image(self) -> None:
        if MANIFEST not in self.files.members:
            raise ArtefactInvalid(
                f"{self.files.path} has no {MANIFEST}: it is not an archive of a container of Kybernate's handler,"
                " and not an export"
            )


def _unpacked_diff(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a layer's bytes, which containerd compresses or not."""
    first = next(pieces, b"")
    kind = "+gzip" if first.startswith(GZIP) else ""
    return decompressed(chain([first], pieces), LAYER + kind)


@contextmanager
def exported(path: Path) -> Iterator[Source]:
    """Give the export at `path`: a layout's directory, a layout's tar file, or an archive.

    Raises ArtefactInvalid and OSError.
    """
    if path.is_dir():
        yield LayoutSource(_Directory(path))
        return
    with os.fdopen(open_plain(path), "rb") as stream:
        files = TarFiles(path, stream, _members(stream))
        yield LayoutSource(files) if "index.json" in files.members else ArchiveSource(files)


@dataclass(frozen=True)
class _Directory:
    path: Path

    def opened(self, name: str) -> Iterator[bytes]:
        _require_name(name)
        try:
            with os.fdopen(open_plain(self.path / name), "rb") as stream:
                while piece := stream.read(PIECE):
                    yield piece
        except OSError as error:
            raise ArtefactInvalid(f"{self.path / name} cannot be read: {error.strerror}") from error


def _members(stream: IO[bytes]) -> dict[str, tuple[int, int]]:
    """Return where each plain file of a tar begins, and its size; none of them is read. Raises ArtefactInvalid."""
    found: dict[str, tuple[int, int]] = {}
    for member in members(stream.read):
        found[member.name] = (stream.tell(), member.size)
        stream.seek(member.size, os.SEEK_CUR)
        if len(found) > MOST_MEMBERS:
            raise ArtefactInvalid(f"it has more than {MOST_MEMBERS} files")
    return found


def _require_name(name: str) -> None:
    """Names come from digests that were compared with a pattern; this is what makes them safe as paths."""
    if name != "index.json" and not BLOB.fullmatch(name):
        raise ArtefactInvalid(f"{name!r} is not a file of a layout")


def _small(pieces: Iterator[bytes]) -> bytes:
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) > MOST_DOCUMENT:
            raise ArtefactInvalid(f"a manifest of more than {MOST_DOCUMENT} bytes")
    return bytes(found)
