"""Compares a checkpoint image with its manifest, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kybernate_shim.checkpoint.image import manifest as manifests
from kybernate_shim.checkpoint.image.counter import Counter
from kybernate_shim.checkpoint.image.digests import Digester, FileUnreadable, algorithm_of
from kybernate_shim.checkpoint.image.manifest import File, Manifest
from kybernate_shim.checkpoint.image.store import LOGS, Problem, read_manifest, size_problems
from kybernate_shim.vram_io import digest as vram_digest
from kybernate_shim.vram_io.errors import VramError


def verify(
    directory: Path,
    progress: Callable[[int, int], object] | None = None,
    *,
    vram: bool = True,
    encryption_key: Path | None = None,
) -> list[Problem]:
    """Compare every file with the manifest, digests included; an empty list means that the image is whole.

    Without `vram`, files of VRAM bytes are not read: the restore compares them as it reads them.
    `progress` is called with the bytes done and the bytes in all, from several threads. An encrypted image is
    decrypted with a key of the file `encryption_key`, block by block. Raises CheckpointNotFound, Refused, and
    CheckpointInvalid where the manifest itself cannot be read.
    """
    manifest, _ = read_manifest(directory)
    if manifest.encryption is None:
        return problems_of(directory, manifest, progress, vram=vram)
    from kybernate_shim.checkpoint.image.encrypted_digests import digest_problems  # few images are encrypted

    problems = size_problems(directory, manifest.stored_files) + _extra(directory, manifest)
    damaged = {problem.file for problem in problems}
    whole = [file for file, kept in zip(manifest.files, manifest.stored_files, strict=True) if kept.name not in damaged]
    total = sum(file.size for file in whole)
    count = Counter(lambda done: progress(done, total) if progress is not None else None)
    problems += digest_problems(directory, manifest, whole, encryption_key, count)
    return sorted(problems, key=lambda problem: problem.file)


def problems_of(
    directory: Path, manifest: Manifest, progress: Callable[[int, int], object] | None = None, *, vram: bool = True
) -> list[Problem]:
    """Compare every plain file in `directory` with `manifest`, as `verify` does."""
    problems = size_problems(directory, manifest.files) + _extra(directory, manifest)
    damaged = {problem.file for problem in problems}
    later = set() if vram else {file.file for file in manifest.moved_files}
    whole = [file for file in manifest.files if file.name not in damaged | later]
    problems += _digest_problems(directory, whole, progress or (lambda done, total: None))
    return sorted(problems, key=lambda problem: problem.file)


def _extra(directory: Path, manifest: Manifest) -> list[Problem]:
    known = {file.name for file in manifest.stored_files} | manifests.NOT_PAYLOAD
    found = {path.name for path in directory.iterdir() if path.suffix != LOGS}
    return [Problem(name, "extra", "the manifest does not list it") for name in found - known]


def _digest_problems(directory: Path, files: Iterable[File], progress: Callable[[int, int], object]) -> list[Problem]:
    groups: dict[str, list[File]] = {}
    problems = []
    for file in files:
        try:
            algorithm = vram_digest.KIND if vram_digest.is_of_tree(file.digest) else algorithm_of(file.digest)
            groups.setdefault(algorithm, []).append(file)
        except FileUnreadable as error:
            problems.append(Problem(file.name, "unreadable", str(error)))
    total = sum(file.size for group in groups.values() for file in group)
    count = Counter(lambda done: progress(done, total))
    for file in groups.pop(vram_digest.KIND, ()):
        problems += _compare_vram(directory, file, count)
    for algorithm, group in groups.items():
        with Digester(algorithm, count) as digester:
            for file in sorted(group, key=lambda file: -file.size):  # small files in parallel with large ones
                with suppress(OSError, FileUnreadable):  # which `_compare` finds as well
                    digester.begin(directory / file.name)
            problems += [problem for file in group if (problem := _compare(digester, directory, file))]
    return problems


def _compare(digester: Digester, directory: Path, file: File) -> Problem | None:
    try:
        digest = digester.digest(directory / file.name)
    except (OSError, FileUnreadable) as error:
        return Problem(file.name, "unreadable", str(error))
    if digest != file.digest:
        return Problem(file.name, "changed", f"digest {digest} found, {file.digest} expected")
    return None


def _compare_vram(directory: Path, file: File, count: Callable[[int], None]) -> list[Problem]:
    from kybernate_shim.vram_io import file_digests  # most images have no such file, and it wants ctypes
    from kybernate_shim.vram_io.thread_pool import CopyOptions

    done = 0

    def progress(now: int) -> None:
        nonlocal done
        count(now - done)
        done = now

    try:
        pieces = vram_digest.piece_bytes_of(file.digest)
        how = CopyOptions(on_progress=progress, digest=file.digest.partition(":")[0])
        digest = file_digests.of_file(directory / file.name, pieces, how)
    except VramError as error:
        return [Problem(file.name, "unreadable", str(error))]
    if digest != file.digest:
        return [Problem(file.name, "changed", f"digest {digest} found, {file.digest} expected")]
    return []
