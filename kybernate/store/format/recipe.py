"""A recipe: how the files of an image are made of chunks. It is written last: an image without one does not exist.

JSON in UTF-8, one object, followed by a line with its keyed BLAKE3 in hexadecimal. Where the store is encrypted, the
JSON is encrypted, and stands in base64. Files are lists of [bytes, chunk], chunk in hexadecimal, "" for zeros.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from dataclasses import dataclass
from typing import Any

import blake3

from kybernate.store.errors import StoreInvalid
from kybernate.store.format.chunks import CHUNK_BYTES
from kybernate.store.format.sealing import ID_BYTES, decrypt, encrypt
from kybernate.store.keys import StoreKey
from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.image.manifest import is_flat

VERSION = 1
PREFIX = "images"
NO_NAMESPACE = "-"
MOST_BYTES = 256 << 20  # of a recipe: an image of some TiB
MOST_VALUES = MOST_BYTES // 8  # in one of small pieces, each has three in some bytes
LABEL = b"kybernate recipe v1\0"
MARK = b"encrypted:"

Piece = tuple[int, bytes]  # bytes, and the id of the chunk; b"" for zeros


@dataclass(frozen=True)
class StoredFile:
    """One file of an image: its name, and the pieces that it is made of, in order."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.pieces)


@dataclass(frozen=True)
class Recipe:
    """An image in the store. `manifest` are the bytes of its signed manifest; `created` is seconds since 1970.

    `namespace` is that of its pod, empty for an image without one; `name` is that of its directory.
    """

    id: str
    namespace: str
    name: str
    created: float
    manifest: bytes
    files: tuple[StoredFile, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all files together."""
        return sum(file.size for file in self.files)

    def chunks(self) -> set[bytes]:
        """Return the ids of all chunks."""
        return {id for file in self.files for _, id in file.pieces if id}


def object_name(namespace: str, id: str) -> str:
    """Return the name of the object that holds a recipe."""
    return f"{PREFIX}/{namespace or NO_NAMESPACE}/{id}"


def of_object(name: str) -> tuple[str, str]:
    """Return namespace and id of the image whose recipe is in an object."""
    namespace, _, id = name.removeprefix(f"{PREFIX}/").partition("/")
    return "" if namespace == NO_NAMESPACE else namespace, id


def encode(key: StoreKey, recipe: Recipe) -> bytes:
    """Return the object of a recipe."""
    document = {
        "version": VERSION,
        "id": recipe.id,
        "namespace": recipe.namespace,
        "name": recipe.name,
        "created": recipe.created,
        "manifest": base64.b64encode(recipe.manifest).decode(),
        "files": [
            {"name": file.name, "pieces": [[size, id.hex()] for size, id in file.pieces]} for file in recipe.files
        ],
    }
    body = json.dumps(document, separators=(",", ":")).encode()
    if key.encrypted:
        body = MARK + base64.b64encode(encrypt(key, body, LABEL))
    return body + b"\n" + _mac(key, body)


def decode(key: StoreKey, content: bytes) -> Recipe:
    """Return the recipe of an object. Raises StoreInvalid where it was changed, or cannot be read."""
    if len(content) > MOST_BYTES:
        raise StoreInvalid(f"a recipe of {len(content)} bytes; at most {MOST_BYTES} are accepted")
    body, _, mac = content.rpartition(b"\n")
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise StoreInvalid("a recipe was changed, was cut, or is of another key")
    try:
        return _recipe(bounded_json.parse(_decrypted(key, body), most_bytes=MOST_BYTES, most_values=MOST_VALUES))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, binascii.Error) as error:
        raise StoreInvalid(f"a recipe cannot be read: {error}") from error


def _mac(key: StoreKey, body: bytes) -> bytes:
    return blake3.blake3(body, key=key.recipes).hexdigest().encode()


def _decrypted(key: StoreKey, body: bytes) -> bytes:
    if not body.startswith(MARK):
        return body
    opened = decrypt(key, base64.b64decode(body.removeprefix(MARK), validate=True), LABEL)
    if opened is None:
        raise StoreInvalid("a recipe was encrypted with another key")
    return opened


def _recipe(document: dict[str, Any]) -> Recipe:
    version = document["version"]
    if version != VERSION:
        raise StoreInvalid(f"a recipe of version {version!r}; this release reads {VERSION}")
    files = tuple(
        StoredFile(_flat(file["name"]), tuple(_piece(size, id) for size, id in file["pieces"]))
        for file in document["files"]
    )
    manifest = base64.b64decode(document["manifest"], validate=True)
    id, namespace, name = (str(document[field]) for field in ("id", "namespace", "name"))
    return Recipe(id, namespace, name, float(document["created"]), manifest, files)


def _flat(name: str) -> str:
    if not is_flat(name):
        raise ValueError(f"{name!r} is not the name of a file in an image's directory")
    return name


def _piece(size: int, id: str) -> Piece:
    chunk = bytes.fromhex(id)
    if type(size) is not int or size < 0 or len(chunk) not in (0, ID_BYTES) or (chunk and size > CHUNK_BYTES):
        raise ValueError(f"[{size!r}, {id!r}] is not a piece of a file")
    return size, chunk
