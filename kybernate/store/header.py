"""The object that makes a prefix a store: which version its form has, and which key names its chunks."""

from __future__ import annotations

import json
import uuid

from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format.chunks import CHUNK_BYTES
from kybernate.store.format.documents import parse
from kybernate.store.keys import StoreKey
from kybernate.store.objects import Objects

NAME = "kybernate-store.json"
VERSION = 1
MOST_BYTES = 64 << 10


async def make(objects: Objects, key: StoreKey) -> str:
    """Make an empty prefix a store, and return its id; a store that is there stays. Raises StoreInvalid."""
    try:
        return await check(objects, key)
    except ObjectMissing:
        pass
    async for found in objects.list("packs"):
        raise StoreInvalid(f"there are packs ({found.name}), but no {NAME}", advice="`kybernate store check --repair`")
    header = {"version": VERSION, "id": str(uuid.uuid4()), "key": key.id, "encrypted": key.encrypted}
    await objects.create(NAME, json.dumps(header | {"chunk_bytes": CHUNK_BYTES}, indent=1).encode() + b"\n")
    return await check(objects, key)  # of two that made it concurrently, both take what is there now


async def check(objects: Objects, key: StoreKey) -> str:
    """Return the id of a store that `key` fits. Raises ObjectMissing where there is none, and StoreInvalid."""
    header = parse(NAME, await objects.get(NAME, most=MOST_BYTES))
    try:
        version, id, of_key, encrypted = (header[name] for name in ("version", "id", "key", "encrypted"))
    except KeyError as error:
        raise StoreInvalid(f"{NAME} cannot be read: it lacks {error}") from error
    if version != VERSION:
        raise StoreInvalid(f"the store has version {version}; this release reads {VERSION}")
    if (of_key, encrypted) != (key.id, key.encrypted):
        kind = "an encrypted" if encrypted else "a plain"
        raise StoreInvalid(
            f"the store is {kind} one of key {of_key}, not of {key.id}", advice="all nodes of a store share its key"
        )
    return str(id)
