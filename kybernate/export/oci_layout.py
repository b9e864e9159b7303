"""An OCI image layout, as a directory or as one tar file: what `ctr images import`, skopeo and podman read.

It appears under its name when it is on the disk as a whole. A layer's digest is known when it has been written, so a
file of the tar gets its header afterwards: the layers are read and compressed once.
Source: OCI image specification 1.1, "Image Layout".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from kybernate.export import documents
from kybernate.export.documents import CONFIG, MANIFEST, Descriptor, descriptor_of, encode
from kybernate.export.layers import Compression, LayerStream, layers_of
from kybernate.export.tar_stream import BLOCK, END, header
from kybernate.node.failure import Failure
from kybernate.node.reading import OnProgress
from kybernate_shim.checkpoint.image.store import Image, require_space
from kybernate_shim.errors import NoRoom
from kybernate_shim.linux.atomic_write import creating, sync
from kybernate_shim.linux.private_files import DIRECTORY_MODE, create_private

LAYOUT = encode({"imageLayoutVersion": "1.0.0"})


class Layout(Protocol):
    """A layout that is written."""

    def stream(self, pieces: Iterable[bytes | memoryview], digest: Callable[[], str]) -> None:
        """Write a blob whose digest `digest` gives when its pieces have been read."""

    def file(self, name: str, content: bytes) -> None:
        """Write a small file."""


def write_layout(
    image: Image,
    target: Path,
    name: str,
    *,
    compression: Compression,
    directory: bool,
    progress: OnProgress = lambda done, total: None,
) -> Descriptor:
    """Write the image as a layout at `target`, where nothing is yet, and return its manifest's descriptor.

    `name` is the tag in the layout, or a whole reference. Raises Failure, and what `progress` raises; nothing is
    left then.
    """
    try:
        require_space(target.parent, image.manifest.bytes, what="export")
        with (_directory if directory else _archive)(target) as layout:
            return _write(image, layout, name, compression, progress)
    except (OSError, NoRoom) as error:
        raise Failure(f"{image.path} cannot be exported to {target}: {error}", state="nothing is left") from error


def _write(image: Image, layout: Layout, name: str, compression: Compression, progress: OnProgress) -> Descriptor:
    layers = layers_of(image)
    total, done = sum(layer.bytes for layer in layers), 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    streams = [LayerStream(layer, compression, count) for layer in layers]
    for stream in streams:
        layout.stream(stream, lambda stream=stream: _finished(stream).digest)  # type: ignore[misc]
    settings = documents.config(image.manifest, [stream.diff_id for stream in streams])
    manifest = documents.oci_manifest(image, descriptor_of(settings, CONFIG), [_finished(one) for one in streams])
    described = descriptor_of(manifest, MANIFEST)
    for content, media in ((settings, CONFIG), (manifest, MANIFEST)):
        layout.file(_blob(descriptor_of(content, media).digest), content)
    layout.file("oci-layout", LAYOUT)
    layout.file("index.json", documents.index(described, name))
    return described


def _finished(stream: LayerStream) -> Descriptor:
    assert stream.descriptor is not None
    return stream.descriptor


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


class _Directory:
    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "blobs/sha256").mkdir(parents=True, mode=DIRECTORY_MODE)

    def stream(self, pieces: Iterable[bytes | memoryview], digest: Callable[[], str]) -> None:
        staging = self._path / "staging"
        with create_private(staging, exclusive=True) as out:
            for piece in pieces:
                out.write(piece)
        sync(staging)
        staging.rename(self._path / _blob(digest()))

    def file(self, name: str, content: bytes) -> None:
        with create_private(self._path / name, exclusive=True) as out:
            out.write(content)
        sync(self._path / name)


class _Archive:
    def __init__(self, out: IO[bytes]) -> None:
        self._out, self._names = out, set[str]()

    def stream(self, pieces: Iterable[bytes | memoryview], digest: Callable[[], str]) -> None:
        start = self._out.tell()
        self._out.write(bytes(BLOCK))
        for piece in pieces:
            self._out.write(piece)
        size = self._out.tell() - start - BLOCK
        self._out.write(bytes(-size % BLOCK))
        end = self._out.tell()
        self._out.seek(start)
        self._out.write(header(_blob(digest()), size, long_size=True))
        self._out.seek(end)

    def file(self, name: str, content: bytes) -> None:
        if name not in self._names:
            self._names.add(name)
            self._out.write(header(name, len(content)) + content + bytes(-len(content) % BLOCK))


@contextmanager
def _directory(target: Path) -> Iterator[Layout]:
    _require_free(target)
    staging = _staging(target)
    staging.mkdir(mode=DIRECTORY_MODE)
    try:
        yield _Directory(staging)
        for path in (staging / "blobs/sha256", staging / "blobs", staging):
            sync(path)
        staging.rename(target)  # fails where a directory with files is there by now
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync(target.parent)


@contextmanager
def _archive(target: Path) -> Iterator[Layout]:
    with new_file(target) as out:
        yield _Archive(out)
        out.write(END)


@contextmanager
def new_file(target: Path) -> Iterator[IO[bytes]]:
    """Give a file that appears at `target` at the end, durably. After a failure, nothing is there. Raises OSError."""
    _require_free(target)
    with creating(target, staging=_staging(target)) as out:
        yield out


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise Failure(f"{target} exists", state="nothing was written", advice="give another name, or remove it")


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(4).hex()}")
