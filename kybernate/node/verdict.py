"""All that is wrong with a checkpoint image: the one judgement of `kybernate inspect --verify` and of the agent.

An image is good when its files are those of its manifest, the manifest is what a key that is valid here has signed, and
a restore would find what the processes have open. Files that are unchanged prove nothing where the manifest itself is
another one than was signed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kybernate.node.failure import Refused
from kybernate.node.trusted import known_keys, ring_of, signature_of
from kybernate_shim.checkpoint.at_rest import unrestorable
from kybernate_shim.checkpoint.image.manifest import NAME, ManifestInvalid, decode
from kybernate_shim.checkpoint.image.store import Image, Problem, read_manifest
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import KeyRing

SIGNATURE: Final = "signature"  # the kind of a problem


def problems_with(directory: Path, config: Config, progress: Callable[[int, int], object]) -> list[Problem]:
    """Compare an image with its manifest, and that with its signature; return what is wrong, the worst first.

    Raises CheckpointNotFound, CheckpointInvalid where the manifest cannot be read, and Refused.
    """
    problems = verify(directory, progress, encryption_key=config.encryption_key)
    manifest, content = read_manifest(directory)
    if not problems:
        problems = [*unrestorable(directory, manifest)]
    if reason := signature_problem(Image(directory, manifest, content=content), config):
        problems.insert(0, Problem(NAME, SIGNATURE, reason))
    return problems


def manifest_fault(content: bytes, ring: KeyRing) -> str:
    """Return why a manifest alone shows that its image is damaged, "" where it does not.

    One that is signed by another node's key is not.
    """
    try:
        image = Image(Path(NAME), decode(content), content=content)
    except ManifestInvalid as error:
        return f"its manifest cannot be read: {error}"
    signed = signature_of(image, ring)
    return signed.reason if signed.fault == "changed" else ""


def signature_problem(image: Image, config: Config) -> str:
    """Return why no key that is valid here is known to have signed the image, "" where one has."""
    try:
        return signature_of(image, ring_of(known_keys(config))).reason
    except Refused as error:
        return f"not checked: {error}"
