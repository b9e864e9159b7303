"""A checkpoint image on disk: written so that it is whole or does not exist, read so that a broken one is named.

The manifest decides: it is written last, after everything that it lists is on the disk, and it appears under its name
in one step. A directory without it is rubbish of a checkpoint that failed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kybernate_shim.checkpoint.image import manifest as manifests
from kybernate_shim.checkpoint.image.manifest import File, Manifest, ManifestInvalid, is_flat
from kybernate_shim.errors import Damaged, Missing, NoRoom
from kybernate_shim.linux.atomic_write import replace_file, sync
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.sizes import mib

SHOWN_PROBLEMS = 20
LOGS = ".log"  # logs are for people: they may grow after the manifest, so they are no part of the image


class CheckpointNotFound(Missing):
    """There is no checkpoint image at that place."""


class CheckpointInvalid(Damaged):
    """The directory claims to be a checkpoint image, but cannot be restored. The message names what is wrong."""


@dataclass(frozen=True)
class Image:
    """A checkpoint image whose manifest is valid and whose files are all there with the right sizes.

    `checked`: who handed it over has compared every byte with a digest already. `arriving`: of the files with VRAM,
    some bytes may not be there yet; vram_io/arrival.py says which.
    """

    path: Path
    manifest: Manifest
    checked: bool = False
    content: bytes = field(default=b"", compare=False, repr=False)  # of the manifest's file, for its signature
    arriving: bool = False

    @property
    def digest(self) -> str:
        """Return the manifest's, `sha256:<hex>`."""
        return _sha256(self.content)

    @property
    def manifest_name(self) -> str:
        """Return the name of the file with the manifest."""
        return manifests.ARRIVING if self.arriving else manifests.NAME

    def piped_streams(self) -> tuple[int, ...]:
        """Return which of 0, 1 and 2 were pipes: they must be pipes again, or CRIU finds none to connect them to."""
        return tuple(number for number, kind in enumerate(self.manifest.stdio) if kind == "pipe")


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file: `missing`, `extra`, `truncated`, `longer`, `changed`, `unreadable`."""

    file: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind} ({self.detail})"


def require_space(directory: Path, needed: int, *, what: str = "checkpoint", reserve: int = 64 << 20) -> None:
    """Raise NoRoom unless the filesystem of `directory` has room for `needed` bytes and `reserve` in addition.

    `what` the bytes are is said in the message.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < needed + reserve:
        raise NoRoom(
            f"{directory}: {mib(free)} free, the {what} needs about {mib(needed)} and {mib(reserve)} to spare: "
            "nothing was changed; make room or choose another directory"
        )


def payload_names(directory: Path) -> list[str]:
    """Return the sorted names of the files that belong into the manifest.

    Raises CheckpointInvalid for anything but plain files: containerd carries nothing else.
    """
    names = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) or not is_flat(entry.name):
                raise CheckpointInvalid(f"{entry.path}: a checkpoint image holds plain files only")
            if entry.name not in manifests.NOT_PAYLOAD and not entry.name.endswith(LOGS):
                names.append(entry.name)
    return sorted(names)


def write_manifest(directory: Path, manifest: Manifest, *, durable: bool = True) -> str:
    """Make the finished files in `directory` a checkpoint image; return the manifest's digest, `sha256:<hex>`.

    With `durable`, image and manifest survive a power failure once this returns; without, as fits a directory that
    containerd copies and removes immediately, only their order is kept. Raises CheckpointInvalid and
    OSError; there is no image then.
    """
    content = manifests.encode(manifest)
    try:
        manifests.decode(content)  # an image that no restore accepts must fail now, while the container is there
    except ManifestInvalid as error:
        raise CheckpointInvalid(f"{directory}: the image cannot be described: {error}") from error
    if durable:
        with ThreadPoolExecutor(4, "fsync") as pool:
            list(pool.map(lambda file: sync(directory / file.name), manifest.stored_files))
    replace_file(directory / manifests.NAME, content, durable=durable, staging=manifests.STAGING)
    if durable:
        sync(directory.parent)
    return _sha256(content)


def _sha256(content: bytes) -> str:
    from hashlib import sha256  # a checkpoint is rare in a shim's life, OpenSSL's import is not free

    return f"sha256:{sha256(content).hexdigest()}"


def read_image(directory: Path) -> Image:
    """Return the image in `directory`, after a look at every file's size, but not at its content; blocks.

    Raises CheckpointNotFound or CheckpointInvalid.
    """
    return _image(directory, manifests.NAME)


def read_for_restore(directory: Path) -> Image:
    """Do as `read_image`, and also take an image whose files with VRAM are still arriving. For a restore alone."""
    with suppress(CheckpointNotFound):
        return read_image(directory)
    with suppress(CheckpointNotFound):
        return replace(_image(directory, manifests.ARRIVING), arriving=True)
    return read_image(directory)  # it has arrived between the two looks, or says why there is none


def _image(directory: Path, name: str) -> Image:
    manifest, content = read_manifest(directory, name)
    if problems := size_problems(directory, manifest.stored_files):
        raise CheckpointInvalid(f"{directory}: {listed(problems)}")
    return Image(directory, manifest, content=content)


def read_manifest(directory: Path, name: str = manifests.NAME) -> tuple[Manifest, bytes]:
    """Return the manifest of the image in `directory`, and its bytes. Raises as `read_image` does."""
    try:
        content = read_plain(directory / name, most=manifests.MOST_BYTES)
        return manifests.decode(content), content
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(_absent(directory)) from None
    except OSError as error:
        raise CheckpointInvalid(f"{directory / name}: {error.strerror}") from error
    except ManifestInvalid as error:
        raise CheckpointInvalid(f"{directory / name}: {error}") from error


def listed(problems: Sequence[Problem]) -> str:
    """Return the first problems in words, for a message that people read."""
    more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    return "; ".join(map(str, problems[:SHOWN_PROBLEMS])) + more


def _absent(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such directory"
    return f"{directory}: no {manifests.NAME}, so this is not a finished checkpoint image"


def size_problems(directory: Path, files: Iterable[File]) -> list[Problem]:
    """Compare kinds and sizes of files with the manifest, without reading them."""
    problems = []
    for file in files:
        try:
            status = (directory / file.name).lstat()
        except FileNotFoundError:
            problems.append(Problem(file.name, "missing", f"{file.size} bytes expected"))
            continue
        except OSError as error:
            problems.append(Problem(file.name, "unreadable", error.strerror or str(error)))
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(Problem(file.name, "changed", "not a plain file"))
        elif status.st_size != file.size:
            kind = "truncated" if status.st_size < file.size else "longer"
            problems.append(Problem(file.name, kind, f"{status.st_size} bytes found, {file.size} expected"))
    return problems
