"""The key of a store, and the keys that are derived from it: for the names of chunks, for recipes, for encryption.

All nodes that share a store have the same key. Names of chunks are keyed digests, so a client that can list the store
but has no key cannot find out whether a known content is in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import blake3

from kybernate.store.errors import StoreInvalid
from kybernate_shim.errors import Refused
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.plain_files import open_plain
from kybernate_shim.linux.private_files import make_directory
from kybernate_shim.trust.places import require_private

KEY_BYTES = 32
CONTEXT = "kybernate store v1 "  # of BLAKE3's key derivation, before the purpose


@dataclass(frozen=True)
class StoreKey:
    """The secret of a store. `encrypted` says whether chunks and recipes are encrypted as well."""

    secret: bytes
    encrypted: bool = False

    def __repr__(self) -> str:
        return f"StoreKey({self.id}, encrypted={self.encrypted})"

    @cached_property
    def id(self) -> str:
        """A name for the key that says nothing about it: 16 hexadecimal digits."""
        return self._derived("id").hex()[:16]

    @cached_property
    def names(self) -> bytes:
        """The key of the digests that name chunks and packs."""
        return self._derived("chunk names")

    @cached_property
    def recipes(self) -> bytes:
        """The key of the digests that authenticate recipes and indexes."""
        return self._derived("recipes")

    @cached_property
    def encryption(self) -> bytes:
        """The key of AES-256-GCM."""
        return self._derived("encryption")

    def _derived(self, purpose: str) -> bytes:
        return blake3.blake3(self.secret, derive_key_context=CONTEXT + purpose).digest()


def read_key(path: Path, *, encrypted: bool = False) -> StoreKey:
    """Return the key in `path`, a file of 32 bytes that is root's own. Raises StoreInvalid."""
    try:
        require_private(path.parent)
        with os.fdopen(open_plain(path, most=KEY_BYTES + 1), "rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except (OSError, Refused) as error:
        raise StoreInvalid(f"the store's key {path} cannot be used: {error}") from error
    if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise StoreInvalid(f"the store's key {path} is open to other users", advice=f"chmod 600 {path}")
    if len(content) != KEY_BYTES:
        raise StoreInvalid(f"the store's key {path} has {len(content)} bytes, not {KEY_BYTES}")
    return StoreKey(content, encrypted)


def make_key(path: Path) -> None:
    """Write a new key to `path`, durably; an existing one stays."""
    make_directory(path.parent)
    replace_file(path, os.urandom(KEY_BYTES), durable=True, keep=True)
