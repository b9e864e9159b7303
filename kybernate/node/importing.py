"""Makes a foreign checkpoint image one of this node's: read and compared, shown, then signed and put in its place.

An image comes in two steps, between which an administrator agrees. `examine` reads every file once and keeps the
manifest, the container's configuration, and a BLAKE3 digest of each file. `admit` copies the files, and compares what
it copies with those digests: so what was examined is what is signed, although others may still write to the source.

The copy is written to a hidden directory next to its place and is renamed at the end. An image that only root can
change is given its new manifest where it lies, and moved: at every moment there is one whole image.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from kybernate.node.audited import audit, image_ref
from kybernate.node.failure import Failure
from kybernate.node.images import STAGING
from kybernate.node.reading import (
    OnProgress,
    digest_for,
    opened,
    opened_directory,
    pieces_of,
    require_same,
    strong_digest_for,
)
from kybernate.node.restore import MOST_SPEC
from kybernate.node.trusted import openness_of
from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.image.digests import FileUnreadable
from kybernate_shim.checkpoint.image.locate import NAME as IMAGE_NAME
from kybernate_shim.checkpoint.image.locate import namespace_root
from kybernate_shim.checkpoint.image.manifest import (
    MOST_BYTES,
    NAME,
    NOT_PAYLOAD,
    SAVED_SPEC,
    File,
    Manifest,
    ManifestInvalid,
    decode,
    encode,
)
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import LOGS, require_space, write_manifest
from kybernate_shim.config import Config
from kybernate_shim.errors import Damaged, NoRoom, Refused
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.linux.private_files import DIRECTORY_MODE, FILE_MODE, NO_OTHERS
from kybernate_shim.trust.keys import signing_key
from kybernate_shim.trust.places import close_to_others, make_private
from kybernate_shim.vram_io.errors import VramError

MOST_THREADS = 8  # more only contend for memory bandwidth
SHOWN = 5


IMAGE_NOT_WHOLE_ADVICE: Final = "it cannot be imported; copy it again from where it was made"


@dataclass(frozen=True)
class Examined:
    """A foreign image as it was read. `spec` is the container's OCI configuration, {} where the image has none.

    `digests` by file are made with BLAKE3, in the form of the manifest's. `rooted`: only root can change the image, so
    it need not be copied.
    """

    directory: Path
    manifest: Manifest
    content: bytes
    spec: Mapping[str, Any]
    digests: Mapping[str, str]
    rooted: bool


@dataclass(frozen=True)
class Imported:
    """The manifest of an image that is now this node's. `unaudited`: why the audit log has no line of it."""

    manifest: Manifest
    unaudited: str


def examine(directory: Path, progress: OnProgress = lambda done, total: None) -> Examined:
    """Read an image and compare every byte with its manifest. Raises Failure."""
    try:
        with opened_directory(directory) as source:
            content = read_plain(NAME, directory=source, most=MOST_BYTES)
            manifest = decode(content)
            _require_plain(directory, manifest)
            _require_complete(source, manifest)
            rooted = not openness_of(directory, manifest).changeable
            digests, spec = _digests(source, manifest, progress)
    except FileNotFoundError as error:
        raise Failure(f"{directory} is not a complete checkpoint image: {error.filename} is missing") from error
    except (ManifestInvalid, FileUnreadable, VramError, RecursionError) as error:
        raise Failure(f"{directory}: {error}", state="nothing was imported", advice=IMAGE_NOT_WHOLE_ADVICE) from error
    except OSError as error:
        raise Failure(f"{directory} cannot be read: {error}", state="nothing was imported") from error
    return Examined(directory, manifest, content, spec, digests, rooted)


def target_of(image: Path, name: str, namespace: str, config: Config) -> Path:
    """Return where an image of `namespace`, "" for root's own, belongs. Raises Failure."""
    name = name or image.name
    if not IMAGE_NAME.fullmatch(name):
        raise Failure(
            f"{name!r} is not the name of an image: letters, digits, `.`, `_` and `-`, in parts that begin with a"
            " letter or a digit",
            advice="give a name after the directory",
        )
    try:
        root = namespace_root(config, namespace) if namespace else config.checkpoint_root
    except Refused as error:
        raise Failure(f"{namespace!r} is not the name of a Kubernetes namespace") from error
    return root / name


def admit(
    image: Examined,
    target: Path,
    namespace: str,
    config: Config,
    *,
    move: bool,
    progress: OnProgress = lambda done, total: None,
    staging: str = "",
    origin: str = "",
) -> Imported:
    """Sign the image for `namespace` with the node's signing key, and put it at `target`. Raises Failure.

    With `move`, there is nothing left at its old place. After a failure the image is where it was. `staging` names the
    directory next to `target` that a copy is written to, for those who remove it after a crash; it begins with STAGING.
    `origin` is where the image comes from, for the audit log.
    """
    origin = origin or str(image.directory)
    staging = staging or f"{STAGING}{os.urandom(8).hex()}"
    try:
        manifest = _admit(image, target, namespace, config, move=move, progress=progress, staging=staging)
    except Failure as error:
        _audit(image, target, image.manifest, config, origin, error)
        raise
    return Imported(manifest, _audit(image, target, manifest, config, origin))


def _admit(
    image: Examined, target: Path, namespace: str, config: Config, *, move: bool, progress: OnProgress, staging: str
) -> Manifest:
    _require_free(image.directory, target)
    try:
        with _umask():
            manifest = sign(_manifest(image, namespace), signing_key(config))
            make_private(target.parent)
            if image.rooted and (move or target == image.directory) and _same_filesystem(image.directory, target):
                _sign_in_place(image, manifest)
                _rename(image.directory, target)
            else:  # others might still write to files that were moved, by descriptors that are open
                _copy(image, target, manifest, progress, target.with_name(staging))
                if move and target != image.directory:
                    shutil.rmtree(image.directory)
    except FileUnreadable as error:
        raise Failure(
            f"{image.directory} was changed after it was examined: {error}", state="nothing was imported"
        ) from error
    except (Refused, NoRoom, Damaged, OSError) as error:
        raise Failure(f"{image.directory} cannot be imported: {error}", state="nothing was imported") from error
    return manifest


def _require_free(source: Path, target: Path) -> None:
    if target == source:
        return
    if os.path.lexists(target):
        raise Failure(f"{target} exists", state="nothing was imported", advice="give another name, or remove it")
    if target.is_relative_to(source):
        raise Failure(
            f"{target} would be inside the image itself, which has the name of the namespace",
            state="nothing was imported",
            advice="move the image elsewhere first",
        )


def _audit(
    image: Examined, target: Path, manifest: Manifest, config: Config, origin: str, error: Failure | None = None
) -> str:
    """Leave a line in the audit log, and return why there is none, "" if there is."""
    ref = image_ref(target, manifest, f"sha256:{sha256(encode(manifest)).hexdigest()}")
    reason = str(error) if error else f"from {origin}"
    return audit("import", "failed" if error else "done", ref, config, reason=reason)


def _require_plain(directory: Path, manifest: Manifest) -> None:
    if manifest.encryption is not None:
        raise Failure(f"{directory} is encrypted", advice="decrypt it before, on a node where its signature is valid")


def _require_complete(source: int, manifest: Manifest) -> None:
    """Refuse an image with more files than its manifest lists; logs and what a registry keeps are left behind."""
    known = {file.name for file in manifest.files} | NOT_PAYLOAD
    found = {name for name in os.listdir(source) if not name.endswith(LOGS)}  # of a descriptor
    if extra := sorted(found - known):
        shown = ", ".join(extra[:SHOWN])
        raise FileUnreadable(f"{len(extra)} entries that the manifest does not list: {shown}")


def _digests(source: int, manifest: Manifest, progress: OnProgress) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the BLAKE3 digest of every file, and the container's configuration, all compared with the manifest."""
    count = _Count(manifest.bytes, progress)
    kept = bytearray()

    def read(file: File) -> str:
        keep = kept if file.name == SAVED_SPEC and file.size <= MOST_SPEC else None
        own, strong = digest_for(file), strong_digest_for(file)
        with opened(file.name, source) as fd:
            for piece in pieces_of(fd, file.name, file.size):
                own.update(piece)
                strong.update(piece)
                if keep is not None:
                    keep += piece
                count(len(piece))
        require_same(file, file.size, own.text())
        return strong.text()

    digests = _in_threads(read, manifest.files)
    return digests, _parsed(bytes(kept)) if kept else {}


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        spec = bounded_json.parse(content, most_bytes=MOST_SPEC)
    except ValueError as error:
        raise FileUnreadable(f"{SAVED_SPEC}: not JSON: {error}") from error
    if not isinstance(spec, dict) or not _texts(spec.get("annotations") or {}):
        raise FileUnreadable(f"{SAVED_SPEC}: not an OCI configuration")
    return spec


def _texts(annotations: object) -> bool:
    return isinstance(annotations, dict) and all(isinstance(value, str) for value in annotations.values())


def _in_threads(work: Callable[[File], str], files: tuple[File, ...]) -> dict[str, str]:
    """Do the work for each file, and return what it gives by the files' names; the first error ends it."""
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "import") as pool:
        try:
            return {file.name: digest for file, digest in zip(files, pool.map(work, files), strict=True)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _manifest(image: Examined, namespace: str) -> Manifest:
    """Return the image's manifest for its new namespace, with strong digests; those of VRAM are there twice."""
    old, digests = image.manifest, image.digests
    return replace(
        old,
        files=tuple(replace(file, digest=digests[file.name]) for file in old.files),
        vram=tuple(replace(file, digest=digests[file.file]) for file in old.vram),
        arena=tuple(replace(file, digest=digests[file.file]) for file in old.arena),
        source=replace(old.source, namespace=namespace),
    )


def _sign_in_place(image: Examined, manifest: Manifest) -> None:
    """Give an image that only root can change its new manifest, and close it to other users."""
    for name in (NAME, *(file.name for file in manifest.files)):
        (image.directory / name).chmod(FILE_MODE)
    close_to_others(image.directory, empty=True)
    write_manifest(image.directory, manifest)


def _rename(directory: Path, target: Path) -> None:
    if target != directory:
        directory.rename(target)
        for parent in (directory.parent, target.parent):
            sync(parent)


def _copy(image: Examined, target: Path, manifest: Manifest, progress: OnProgress, staging: Path) -> None:
    """Copy the image's files through descriptors; `target` appears when all of them are on the disk."""
    require_space(target.parent, manifest.bytes)
    staging.mkdir(mode=DIRECTORY_MODE)
    try:
        count = _Count(manifest.bytes, progress)
        with opened_directory(image.directory) as source, opened_directory(staging) as to:
            copied = _in_threads(lambda file: _copy_file(file, source, to, count), manifest.files)
        if changed := sorted(name for name, digest in copied.items() if digest != image.digests[name]):
            raise FileUnreadable(f"{len(changed)} files were changed, {changed[0]} among them")
        write_manifest(staging, manifest)
        _replace_nothing(staging, target, image.directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync(target.parent)


def _replace_nothing(staging: Path, target: Path, source: Path) -> None:
    """Rename the copy to its place; where it replaces its own source, the source is removed first."""
    if target == source:
        shutil.rmtree(source)
    staging.rename(target)


def _copy_file(file: File, source: int, to: int, count: _Count) -> str:
    """Copy one file and return the BLAKE3 digest of the copy; zeros become holes, as they are in files of VRAM."""
    digest = strong_digest_for(file)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(file.name, flags, FILE_MODE, dir_fd=to)
    try:
        with opened(file.name, source) as fd:
            for piece in pieces_of(fd, file.name, file.size):
                digest.update(piece)
                _write(out, piece)
                count(len(piece))
        os.ftruncate(out, file.size)
    finally:
        os.close(out)
    return digest.text()


def _write(fd: int, piece: memoryview) -> None:
    if piece[0] == 0 and not any(piece[:4096]) and piece == bytes(len(piece)):
        os.lseek(fd, len(piece), os.SEEK_CUR)
        return
    while piece:
        piece = piece[os.write(fd, piece) :]


def _same_filesystem(directory: Path, target: Path) -> bool:
    return directory.lstat().st_dev == target.parent.stat().st_dev


@contextmanager
def _umask() -> Iterator[None]:
    """Let the manifest be root's own, too."""
    before = os.umask(NO_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


class _Count:
    """Sums what threads have done."""

    def __init__(self, total: int, progress: OnProgress) -> None:
        self._done, self._total, self._progress, self._lock = 0, total, progress, threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            done = self._done
        self._progress(done, self._total)
