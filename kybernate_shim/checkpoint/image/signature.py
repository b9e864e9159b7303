"""The signature of a manifest: made when an image is written or imported, checked before anything of it is believed.

It covers the bytes of the file, not what they mean: so a manifest of another release, with fields that this one does
not have, is checked without being understood. The value itself is replaced by zeros in what is signed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from kybernate_shim.checkpoint.image.manifest import Manifest, Signature, encode
from kybernate_shim.errors import Refused
from kybernate_shim.trust.keys import Key, KeyRing

BLANK: Final = "0" * 64
HEXADECIMAL: Final = re.compile("[0-9a-f]{64}")


def sign(manifest: Manifest, key: Key) -> Manifest:
    """Return the manifest with the signature of `key`."""
    blank = encode(replace(manifest, signature=Signature(key.id, BLANK)))
    return replace(manifest, signature=Signature(key.id, key.sign(blank)))


def signer_of(content: bytes, manifest: Manifest, ring: KeyRing) -> Key:
    """Return the key that has signed the manifest, which was decoded from `content`. Raises Refused."""
    signature = manifest.signature
    if not signature.key:
        raise Refused("the image is not signed")
    key = ring.find(signature.key)
    if key is None:
        known = ", ".join(one.id for one in ring.keys) or "none"
        raise Refused(f"the image is signed by key {signature.key}, which is not valid here (valid: {known})")
    mark = _field(signature.value) if HEXADECIMAL.fullmatch(signature.value) else b""
    if (
        not mark
        or content.count(mark) != 1
        or not key.has_signed(content.replace(mark, _field(BLANK)), signature.value)
    ):
        raise Refused(f"the signature of key {key.id} does not match: the manifest was changed after it was signed")
    return key


def _field(value: str) -> bytes:
    """Return the value as `encode` writes it. A quote cannot stand in a text of JSON unescaped, so no text has this."""
    return f'"value": "{value}"'.encode()
