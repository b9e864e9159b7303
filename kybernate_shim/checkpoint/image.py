"""A checkpoint image on disk: written so that it is whole or does not exist, read so that a broken one is named.

The manifest decides: it is written last, after everything that it lists is on the disk, and it appears under its name
in one step. A directory without it is rubbish of a checkpoint that failed.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kybernate_shim.checkpoint import manifest as manifests
from kybernate_shim.checkpoint.digests import Digester, DigestUnknown, FileChanged, algorithm_of
from kybernate_shim.checkpoint.manifest import File, Manifest, ManifestInvalid, is_flat
from kybernate_shim.cuda.vram import digest as vram_digest
from kybernate_shim.cuda.vram.errors import VramError
from kybernate_shim.errors import Damaged, Missing, NoRoom

LOGS = ".log"  # logs are for people: they may grow after the manifest, so they are no part of the image


class CheckpointNotFound(Missing):
    """There is no checkpoint image at that place."""


class CheckpointInvalid(Damaged):
    """The directory claims to be a checkpoint image, but cannot be restored. The message names what is wrong."""


class TierFull(NoRoom):
    """The filesystem has not enough room for the image."""


@dataclass(frozen=True)
class Image:
    """A checkpoint image whose manifest is valid and whose files are all there with the right sizes.

    `checked`: who handed it over has compared every byte with a digest already.
    """

    path: Path
    manifest: Manifest
    checked: bool = False

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


def require_space(directory: Path, needed: int, *, reserve: int = 64 << 20) -> None:
    """Raise TierFull unless the filesystem of `directory` has room for `needed` bytes and `reserve` beside them."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < needed + reserve:
        raise TierFull(
            f"{directory}: {_mib(free)} free, the checkpoint needs about {_mib(needed)} and {_mib(reserve)} to spare: "
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
            if entry.name != manifests.NAME and not entry.name.endswith(LOGS):
                names.append(entry.name)
    return sorted(names)


def write_manifest(directory: Path, manifest: Manifest, *, durable: bool = True) -> str:
    """Make the finished files in `directory` a checkpoint image; return the manifest's digest, `sha256:<hex>`.

    With `durable`, image and manifest survive a power failure once this returns; without, as fits a directory that
    containerd copies and removes at once, only their order is kept. Raises OSError; there is no image then.
    """
    from hashlib import sha256  # a checkpoint is rare in a shim's life, OpenSSL's import is not free

    content = manifests.encode(manifest)
    if durable:
        with ThreadPoolExecutor(4, "fsync") as pool:
            list(pool.map(lambda file: _sync(directory / file.name), manifest.files))
    temporary = directory / f".{manifests.NAME}.tmp"
    try:
        _write(temporary, content, durable=durable)
        temporary.replace(directory / manifests.NAME)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync(directory)
        _sync(directory.parent)
    return f"sha256:{sha256(content).hexdigest()}"


def remove_manifest(directory: Path) -> None:
    """Make the directory no image any more, before anything else in it changes."""
    (directory / manifests.NAME).unlink(missing_ok=True)


def read_image(directory: Path) -> Image:
    """Return the image in `directory`, after a look at every file's size, but not at its content.

    Raises CheckpointNotFound or CheckpointInvalid.
    """
    try:
        content = (directory / manifests.NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(_absent(directory)) from None
    except OSError as error:
        raise CheckpointInvalid(f"{directory / manifests.NAME}: {error.strerror}") from error
    try:
        manifest = manifests.decode(content)
    except ManifestInvalid as error:
        raise CheckpointInvalid(f"{directory / manifests.NAME}: {error}") from error
    if problems := _size_problems(directory, manifest.files):
        raise CheckpointInvalid(f"{directory}: {'; '.join(map(str, problems))}")
    return Image(directory, manifest)


def _absent(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such directory"
    return f"{directory}: no {manifests.NAME}, so this is no finished checkpoint image"


def verify(
    directory: Path, progress: Callable[[int, int], object] | None = None, *, vram: bool = True
) -> list[Problem]:
    """Compare every file with the manifest, digests included; an empty list means that the image is whole.

    Without `vram`, files of VRAM bytes are not read: whoever restores them compares them on the way.
    `progress` is told the bytes done and the bytes in all, from several threads. Raises CheckpointNotFound, and
    CheckpointInvalid where the manifest itself cannot be read.
    """
    try:
        manifest = manifests.decode((directory / manifests.NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(_absent(directory)) from None
    except (OSError, ManifestInvalid) as error:
        raise CheckpointInvalid(f"{directory / manifests.NAME}: {error}") from error
    problems = _size_problems(directory, manifest.files) + _extra(directory, manifest)
    damaged = {problem.file for problem in problems}
    later = set() if vram else {file.file for file in manifest.moved_files}
    whole = [file for file in manifest.files if file.name not in damaged | later]
    problems += _digest_problems(directory, whole, progress or (lambda done, total: None))
    return sorted(problems, key=lambda problem: problem.file)


def _size_problems(directory: Path, files: Iterable[File]) -> list[Problem]:
    problems = []
    for file in files:
        try:
            status = (directory / file.name).lstat()
        except FileNotFoundError:
            problems.append(Problem(file.name, "missing", f"{file.size} bytes expected"))
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(Problem(file.name, "changed", "not a plain file"))
        elif status.st_size != file.size:
            kind = "truncated" if status.st_size < file.size else "longer"
            problems.append(Problem(file.name, kind, f"{status.st_size} bytes found, {file.size} expected"))
    return problems


def _extra(directory: Path, manifest: Manifest) -> list[Problem]:
    known = {file.name for file in manifest.files} | {manifests.NAME}
    found = {path.name for path in directory.iterdir() if path.suffix != LOGS}
    return [Problem(name, "extra", "the manifest does not list it") for name in found - known]


def _digest_problems(directory: Path, files: Iterable[File], progress: Callable[[int, int], object]) -> list[Problem]:
    groups: dict[str, list[File]] = {}
    problems = []
    for file in files:
        try:
            algorithm = vram_digest.KIND if file.digest.startswith(vram_digest.KIND) else algorithm_of(file.digest)
            groups.setdefault(algorithm, []).append(file)
        except DigestUnknown as error:
            problems.append(Problem(file.name, "unreadable", str(error)))
    total = sum(file.size for group in groups.values() for file in group)
    count = _Counter(total, progress)
    for file in groups.pop(vram_digest.KIND, ()):
        problems += _compare_vram(directory, file, count)
    for algorithm, group in groups.items():
        with Digester(algorithm, count) as digester:
            problems += [problem for file in group if (problem := _compare(digester, directory, file))]
    return problems


def _compare(digester: Digester, directory: Path, file: File) -> Problem | None:
    try:
        digest = digester.digest(directory / file.name)
    except (OSError, FileChanged) as error:
        return Problem(file.name, "unreadable", str(error))
    if digest != file.digest:
        return Problem(file.name, "changed", f"digest {digest} found, {file.digest} expected")
    return None


def _compare_vram(directory: Path, file: File, count: Callable[[int], None]) -> list[Problem]:
    from kybernate_shim.cuda.vram.crew import Transfer  # most images have no such file, and it wants ctypes

    done = 0

    def progress(now: int) -> None:
        nonlocal done
        count(now - done)
        done = now

    try:
        pieces = vram_digest.piece_bytes_of(file.digest)
        digest = vram_digest.of_file(directory / file.name, pieces, Transfer(on_progress=progress))
    except VramError as error:
        return [Problem(file.name, "unreadable", str(error))]
    if digest != file.digest:
        return [Problem(file.name, "changed", f"digest {digest} found, {file.digest} expected")]
    return []


class _Counter:
    def __init__(self, total: int, progress: Callable[[int, int], object]) -> None:
        from threading import Lock  # only `verify` counts

        self._done, self._total, self._progress, self._lock = 0, total, progress, Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            done = self._done
        self._progress(done, self._total)


def _write(path: Path, content: bytes, *, durable: bool) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_image(directory: Path) -> None:
    """Delete the directory, manifest first, so that nobody takes what is left for an image."""
    remove_manifest(directory)
    shutil.rmtree(directory)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
