"""The node's keys for checkpoint images: the file that `encryption_key` names.

One key a line, 32 bytes as 64 hexadecimal digits; empty lines and lines that begin with `#` are left out. The first key
encrypts, all of them decrypt: a new key is inserted at the top, and an old one is removed once no image needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kybernate_shim.errors import Refused
from kybernate_shim.trust.encryption import KEY_BYTES, NodeKey, WrappedKey
from kybernate_shim.trust.keys import read_secret_file


def read_keys(path: Path) -> Sequence[NodeKey]:
    """Return the keys of a file, the encrypting one first. Raises Refused, whose message never contains a key."""
    content = read_secret_file(path, f"encryption_key {path}")
    keys = []
    for number, line in enumerate(content.decode("ascii", "replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            keys.append(_parsed(text, f"encryption_key {path}, line {number}"))
    if not keys:
        raise Refused(f"encryption_key {path} holds no key; make one with `openssl rand -hex 32`")
    return keys


def data_key(path: Path | None, wrapped: WrappedKey, image: str) -> bytes:
    """Return the data key of an image from the keys of the file `path`. Raises Refused and EncryptionBroken."""
    if path is None:
        raise Refused(
            f"image {image} is encrypted with key {wrapped.key_id}, and this node has no key: set encryption_key"
        )
    keys = read_keys(path)
    for key in keys:
        if key.id == wrapped.key_id:
            return key.unwrap(wrapped, image)
    there = ", ".join(key.id for key in keys)
    raise Refused(f"image {image} is encrypted with key {wrapped.key_id}, which is not in {path}; it has {there}")


def _parsed(text: str, place: str) -> NodeKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(text) != 2 * KEY_BYTES:
        raise Refused(f"{place}: a key is {2 * KEY_BYTES} hexadecimal digits, as of `openssl rand -hex 32`")
    return NodeKey(key)
