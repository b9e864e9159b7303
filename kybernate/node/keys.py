"""What an administrator does with the node's keys; how they sign is said in kybernate_shim/trust/keys.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kybernate.node.failure import Missing, Refused
from kybernate.node.trusted import KeyFile, known_keys
from kybernate_shim import errors
from kybernate_shim.config import DEFAULT_PATH, Config
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.trust import keys
from kybernate_shim.trust.keys import Key


def rotate_key(config: Config) -> tuple[Key | None, Key]:
    """Make a new node key and return the old and the new one. Raises Refused."""
    try:
        return keys.rotate(config)
    except (errors.Refused, OSError) as error:
        raise Refused(f"the key cannot be rotated: {error}", state="the old key still signs") from error


def files_of(id: str, config: Config) -> list[KeyFile]:
    """Return the files of the key, more than one where a rotation was interrupted. Raises Missing and Refused."""
    found = [file for file in known_keys(config) if file.key is not None and file.key.id == id]
    if not found:
        raise Missing(f"no key here has the identifier {id!r}", advice="`kybernate keys list` lists them")
    if any(file.kind == "shared" for file in found):
        raise Refused(
            f"{id} is the shared key {config.shared_key}, which other nodes also have",
            state="the key is still valid",
            advice=f"put a new key into the file on all nodes, or remove `shared_key` from {DEFAULT_PATH}",
        )
    return found


def remove(files: Sequence[KeyFile]) -> None:
    """Delete the files of a key. Raises Refused."""
    try:
        for file in files:
            file.path.unlink(missing_ok=True)
            sync(file.path.parent)
    except OSError as error:
        raise Refused(f"the key cannot be deleted: {error}", state="it is still valid") from error


def made_at(path: Path) -> float:
    """Return when a key file was written, in seconds since the epoch, 0 where it cannot be seen."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
