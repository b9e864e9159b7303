"""Layers of an exported image, unpacked into a directory. Everything about them is hostile until it is compared.

The image's manifest comes first, and nothing is written that it does not list, by name and by size: so a layer can
neither choose a path nor fill a disk beyond what was checked before. Every layer is compared with its digest to its
last byte. What the manifest itself is worth is for import to find out.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import IO

from kybernate.export.documents import LAYER, ArtefactInvalid, Descriptor
from kybernate.export.entries import FOLDER
from kybernate.export.layer_record import LayerRecord
from kybernate.export.tar_stream import Member, members
from kybernate.node.reading import StreamDigest
from kybernate_shim.checkpoint.image.digest_form import strong_form_of
from kybernate_shim.checkpoint.image.manifest import (
    MOST_BYTES,
    NAME,
    File,
    Manifest,
    ManifestInvalid,
    decode,
    encode,
)
from kybernate_shim.checkpoint.image.store import require_space
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.linux.atomic_write import replace_file, sync
from kybernate_shim.linux.private_files import FILE_MODE

CHUNK = 1 << 20
ROOM_LOOKS = 64 << 20  # bytes of a file whose size no manifest says, after each of which the disk's room is examined
SLACK = 64 << 20  # bytes of headers and of documents for other programs, in all layers together
ENDS = "a layer's archive ends in the middle of a member"
MOST_WINDOW = 128 << 20  # of zstd: what a reader of the field's layers accepts


def verified(pieces: Iterable[bytes], descriptor: Descriptor) -> Iterator[bytes]:
    """Yield a blob's bytes. Raises ArtefactInvalid at its end, or before, unless it has the size and digest."""
    digest, size = sha256(), 0
    for piece in pieces:
        size += len(piece)
        if size > descriptor.size:
            break
        digest.update(piece)
        yield piece
    if size != descriptor.size:
        raise ArtefactInvalid(f"blob {descriptor.digest} has not the {descriptor.size} bytes that its manifest lists")
    if f"sha256:{digest.hexdigest()}" != descriptor.digest:
        raise ArtefactInvalid(f"blob {descriptor.digest} was changed: its digest is sha256:{digest.hexdigest()}")


def decompressed(pieces: Iterable[bytes], media_type: str) -> Iterator[bytes]:
    """Yield what a layer's bytes are before compression, in pieces of bounded size. Raises ArtefactInvalid."""
    kind = media_type.removeprefix(LAYER)
    if kind == "":
        yield from pieces
    elif kind == "+gzip":
        yield from _unzipped(pieces)
    elif kind == "+zstd":
        yield from _unpacked(pieces)
    else:
        raise ArtefactInvalid(f"a layer has the type {media_type}")


def _unzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(31)
    try:
        for piece in pieces:
            while piece:
                yield unpacker.decompress(piece, CHUNK)
                piece = unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error as error:
        raise ArtefactInvalid(f"a layer cannot be decompressed: {error}") from error
    if not unpacker.eof:
        raise ArtefactInvalid("a layer ends in the middle of its compression")


def _unpacked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    import zstandard  # of the extra `oci`

    unpacker = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    try:
        with unpacker.stream_reader(_Pieces(pieces), read_across_frames=True) as stream:  # type: ignore[arg-type]
            while piece := stream.read(CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise ArtefactInvalid(f"a layer cannot be decompressed: {error}") from error


class _Pieces:
    """Pieces as a file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._rest = iter(pieces), memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        size = len(self._rest) if size < 0 else size
        piece, self._rest = self._rest[:size], self._rest[size:]
        return bytes(piece)


class Unpacking:
    """Fills a directory with the files of one image. `manifest` is there once its layer was unpacked.

    The directory is empty, or holds what its `record` says.
    """

    def __init__(
        self,
        directory: Path,
        count: Callable[[int], object] = lambda size: None,
        record: LayerRecord | None = None,
    ) -> None:
        self._directory, self._count, self._record = directory, count, record
        self._missing: dict[str, int] = {}
        self._room = MOST_BYTES + SLACK
        self._content = b""
        self.manifest: Manifest | None = None

    @property
    def total(self) -> int:
        """What the image's files have together, as far as that is known."""
        return sum(file.size for file in self.manifest.stored_files) if self.manifest else 0

    def layer(self, pieces: Iterable[bytes], descriptor: Descriptor) -> None:
        """Unpack a layer from its blob's bytes, unless it is there. Raises ArtefactInvalid, NoRoom and OSError."""
        if self._is_there(descriptor.digest):
            return
        missing, had = dict(self._missing), self.manifest is not None
        self.archive(decompressed(verified(pieces, descriptor), descriptor.media_type))
        if self._record is not None and self.manifest is not None:
            all_files = missing if had else {file.name: 0 for file in self.manifest.stored_files}
            files = all_files.keys() - self._missing.keys()
            self._record.add(descriptor.digest, sorted(files), b"" if had else self._content)

    def _is_there(self, digest: str) -> bool:
        """Take over a layer that was unpacked before, and return whether there was one."""
        whole = self._record.get(digest) if self._record is not None else None
        if whole is None:
            return False
        if whole.manifest and self.manifest is None:
            self._take(whole.manifest)
        if any(self._missing.get(name) != _size(self._directory / name) for name in whole.files):
            return False
        for name in whole.files:
            self._count(self._missing.pop(name))
        return True

    def archive(self, pieces: Iterator[bytes]) -> None:
        """Unpack an archive. Raises ArtefactInvalid, NoRoom and OSError."""
        source = _Exactly(pieces, self._spend)
        for member in members(source.read):
            self._member(member, source)
        source.drain()

    def add_rootfs_diff(self, pieces: Iterable[bytes]) -> None:
        """Make a layer of changed files one of the image's, as a checkpoint by `kybernate` has it.

        No signature covers the manifest then. Raises ArtefactInvalid, NoRoom and OSError.
        """
        assert self.manifest is not None
        if self.manifest.encryption is not None:
            raise ArtefactInvalid(
                "the image is encrypted, and the container's changed files, which CRI has saved, lie next to it as"
                " plain files: checkpoint the container by `kybernate checkpoint`"
            )
        digest, size = StreamDigest(strong_form_of(self.manifest.files[0].digest)), 0
        with self._new(ROOTFS_DIFF) as out:
            for piece in filter(None, pieces):
                if size // ROOM_LOOKS != (size + len(piece)) // ROOM_LOOKS:
                    require_space(self._directory, ROOM_LOOKS, what="container's changed files")
                digest.update(memoryview(piece))
                _put(out, piece)
                size += len(piece)
            out.truncate(size)
        added = File(ROOTFS_DIFF, size, digest.text())
        self.manifest = replace(self.manifest, rootfs_diff=True, files=(*self.manifest.files, added))
        self._content = encode(self.manifest)

    def finish(self) -> None:
        """Make the directory an image: its manifest is written last. Raises ArtefactInvalid where files are missing."""
        if self.manifest is None:
            raise ArtefactInvalid(f"it has no {FOLDER}/{NAME}")
        if self._missing:
            raise ArtefactInvalid(
                f"{len(self._missing)} files of its manifest are missing, {min(self._missing)} among them"
            )
        for file in self.manifest.stored_files:
            sync(self._directory / file.name)
        if self._record is not None:
            self._record.remove()
        replace_file(self._directory / NAME, self._content, durable=True, staging=f".{NAME}.tmp")

    def _member(self, member: Member, source: _Exactly) -> None:
        folder, slash, name = member.name.partition("/")
        if member.is_directory and not slash:
            return
        if folder != FOLDER or not slash:
            source.skip(member.size)
        elif name == NAME and self.manifest is None and member.size <= MOST_BYTES:
            self._take(source.take(member.size))
        elif self._missing.pop(name, None) == member.size and not member.is_directory:
            self._write(name, member.size, source)
        else:
            raise ArtefactInvalid(f"{member.name!r} is not listed in the image's manifest, which comes first")

    def _take(self, content: bytes) -> None:
        try:
            self.manifest = decode(content)
        except ManifestInvalid as error:
            raise ArtefactInvalid(f"{NAME}: {error}") from error
        total = sum(file.size for file in self.manifest.stored_files)
        require_space(self._directory, total, what="image")
        self._content = content
        self._missing = {file.name: file.size for file in self.manifest.stored_files}
        self._room += total

    def _write(self, name: str, size: int, source: _Exactly) -> None:
        if self._record is not None:
            (self._directory / name).unlink(missing_ok=True)  # of a layer that was not used after all
        with self._new(name) as out:
            left = size
            while left:
                piece = source.take(min(left, CHUNK))
                _put(out, piece)
                left -= len(piece)
                self._count(len(piece))
            out.truncate(size)

    def _new(self, name: str) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self._directory / name, flags, FILE_MODE), "wb", buffering=0)

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ArtefactInvalid("its layers hold more than its manifest lists")


class _Exactly:
    """Bytes of a stream, as many as are called for."""

    def __init__(self, pieces: Iterator[bytes], spend: Callable[[int], None]) -> None:
        self._pieces, self._spend, self._rest = pieces, spend, memoryview(b"")

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or none at the end. Raises ArtefactInvalid for some of them."""
        found = bytearray()
        while len(found) < size and self._fill():
            part = self._rest[: size - len(found)]
            found += part
            self._rest = self._rest[len(part) :]
        if found and len(found) < size:
            raise ArtefactInvalid(ENDS)
        return bytes(found)

    def take(self, size: int) -> bytes:
        """Return `size` bytes. Raises ArtefactInvalid where there are fewer."""
        found = self.read(size)
        if len(found) < size:
            raise ArtefactInvalid(ENDS)
        return found

    def skip(self, size: int) -> None:
        """Leave out `size` bytes. Raises ArtefactInvalid where there are fewer."""
        while size:
            size -= len(self.take(min(size, CHUNK)))

    def drain(self) -> None:
        """Read to the end, where the digest is compared."""
        while self._fill():
            self._rest = memoryview(b"")

    def _fill(self) -> bool:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._spend(len(piece))
            self._rest = memoryview(piece)
        return True


def _size(path: Path) -> int:
    """Return the bytes of a file, -1 without one."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return -1


def _put(out: IO[bytes], piece: bytes) -> None:
    """Write a piece; zeros become holes."""
    if piece[0] == 0 and not any(piece[:4096]) and piece == bytes(len(piece)):
        out.seek(len(piece), os.SEEK_CUR)
        return
    view = memoryview(piece)
    while view:
        view = view[out.write(view) :]
