"""Digests of encrypted files, compared with what is in them; nothing of that is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kybernate_shim.checkpoint.image.digest_form import form_of
from kybernate_shim.checkpoint.image.digests import FileUnreadable
from kybernate_shim.checkpoint.image.encrypted import data_key_of, open_encrypted, threads
from kybernate_shim.checkpoint.image.manifest import File, Manifest
from kybernate_shim.checkpoint.image.store import Problem
from kybernate_shim.trust.encryption import SUFFIX, EncryptedFile, EncryptionBroken
from kybernate_shim.vram_io.errors import VramError


def digest_problems(
    directory: Path,
    manifest: Manifest,
    files: Iterable[File],
    encryption_key: Path | None,
    count: Callable[[int], object],
) -> list[Problem]:
    """Compare encrypted files with the digests of what is in them; nothing is kept. Raises Refused."""
    data_key = data_key_of(manifest, encryption_key)
    problems = []
    with ThreadPoolExecutor(threads(), "decrypt") as pool:
        for wanted in files:
            try:
                with open_encrypted(directory, wanted.name, wanted.size, manifest.id, data_key) as file:
                    found = _digest(file, wanted.digest, pool, count)
            except (EncryptionBroken, FileUnreadable, VramError, OSError) as error:
                problems.append(Problem(f"{wanted.name}{SUFFIX}", "unreadable", str(error)))
                continue
            if found != wanted.digest:
                detail = f"digest {found} found, {wanted.digest} expected"
                problems.append(Problem(f"{wanted.name}{SUFFIX}", "changed", detail))
    return problems


def _digest(file: EncryptedFile, like: str, pool: ThreadPoolExecutor, count: Callable[[int], object]) -> str:
    """Return the digest of a file's content, of the kind of `like`."""
    size, form = file.layout.size, form_of(like)

    def leaf(start: int) -> bytes:
        hash = form.new_hash()
        for block in file.blocks(start, min(size, start + form.piece_bytes)):
            hash.update(block)
            count(len(block))
        return hash.digest()

    return form.text(list(pool.map(leaf, form.pieces(size))), size)
