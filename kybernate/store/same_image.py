"""Whether two manifests with one id are of the same image, so that a copy with the one can stand for the other.

An import computes other digests and signs again; nothing else of the image changes. One that is encrypted, or is of
another namespace, is restored by others, and is another image.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from kybernate_shim.checkpoint.image.manifest import Manifest, Signature, decode


def is_same_image(one: bytes, other: bytes) -> bool:
    """Return whether two manifests agree in all but signature and kind of digest. Raises ManifestInvalid."""
    if one == other:
        return True
    left, right = decode(one), decode(other)
    pairs = zip_longest((*left.files, *left.moved_files), (*right.files, *right.moved_files))
    return _bare(left) == _bare(right) and all(a and b and _may_be_equal(a.digest, b.digest) for a, b in pairs)


def _bare(manifest: Manifest) -> Manifest:
    return replace(
        manifest,
        files=tuple(replace(file, digest="") for file in manifest.files),
        vram=tuple(replace(file, digest="") for file in manifest.vram),
        arena=tuple(replace(file, digest="") for file in manifest.arena),
        signature=Signature(),
    )


def _may_be_equal(one: str, other: str) -> bool:
    """Return whether two digests can be of the same bytes: those of one kind are equal then."""
    return one == other or one.partition(":")[0] != other.partition(":")[0]
