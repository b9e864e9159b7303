"""Whether an image is trusted on this node: which key has signed it, and which other users can read or change it.

These are the rules of kybernate_shim/checkpoint/image/genuine.py and trust/places.py, said of an image that only root
has named. `kybernate images` and `inspect` show the answers, and `kybernate restore` decides by them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kybernate.node.failure import Refused
from kybernate_shim import errors
from kybernate_shim.checkpoint.image.genuine import STRONG
from kybernate_shim.checkpoint.image.locate import locate
from kybernate_shim.checkpoint.image.manifest import NAME, Manifest
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.checkpoint.image.signature import signer_of
from kybernate_shim.checkpoint.image.store import CheckpointNotFound, Image
from kybernate_shim.config import Config
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.keys import NODE_KEY, SHARED, Key, KeyRing, key_files, read_key
from kybernate_shim.trust.places import OPEN, WRITABLE, require_private
from kybernate_shim.trust.requester import requester_of

Fault = Literal["", "unsigned", "unknown key", "changed"]
KeyKind = Literal["node", "retired", "shared"]


@dataclass(frozen=True)
class KeyFile:
    """A file with a key that verifies. `key` is None where it cannot be used; `fault` says why then."""

    path: Path
    kind: KeyKind
    key: Key | None
    fault: str = ""


@dataclass(frozen=True)
class Signed:
    """What the signature of an image is worth here. `key` is None unless a valid key has signed it.

    `id` is the identifier of the key that the manifest names, "" where it names none. `reason` is a sentence.
    """

    id: str
    key: Key | None
    fault: Fault = ""
    reason: str = ""

    def __str__(self) -> str:
        """Return a word for a table: the identifier, `-`, or the identifier and what is wrong."""
        if not self.fault:
            return self.id
        return "-" if self.fault == "unsigned" else f"{self.id} ({self.fault})"


@dataclass(frozen=True)
class Openness:
    """What other users can do to an image. `reason` names the first file or directory by which they can."""

    readable: bool = False
    changeable: bool = False
    reason: str = ""


def known_keys(config: Config) -> list[KeyFile]:
    """Return all key files of this node, usable or not, the one that signs first. Raises Refused."""
    shared: list[tuple[Path, KeyKind]] = [(config.shared_key, "shared")] if config.shared_key else []
    try:
        own = key_files(config.key_directory)
    except OSError as error:
        raise Refused(
            f"the keys in {config.key_directory} cannot be listed: {error.strerror}", advice="run as root"
        ) from error
    kinds: list[tuple[Path, KeyKind]] = [(path, _kind(path)) for path in own]
    return [_key_file(path, kind) for path, kind in (*shared, *kinds)]


def _kind(path: Path) -> KeyKind:
    """Return what a file of the key directory is."""
    if path.name == NODE_KEY:
        return "node"
    return "shared" if path.name.startswith(SHARED) else "retired"


def ring_of(keys: list[KeyFile]) -> KeyRing:
    """Return the usable keys."""
    return KeyRing(tuple(file.key for file in keys if file.key is not None))


def signature_of(image: Image, ring: KeyRing) -> Signed:
    """Return who has signed the image."""
    id = image.manifest.signature.key
    try:
        return Signed(id, signer_of(image.content, image.manifest, ring))
    except errors.Refused as error:
        fault: Fault = "unsigned" if not id else "changed" if ring.find(id) else "unknown key"
        return Signed(id, None, fault, str(error))


def openness_of(directory: Path, manifest: Manifest, name: str = NAME) -> Openness:
    """Return what other users can do to the image's files, its directory and those above. Raises OSError.

    `name` is that of the manifest.
    """
    try:
        require_private(directory)
    except errors.Refused as error:
        return Openness(readable=True, changeable=True, reason=str(error))
    status = directory.lstat()
    shut = not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH)  # then no mode of a file in it matters to others
    readable = ""
    for file in (name, *(file.name for file in manifest.stored_files)):
        one = (directory / file).lstat()
        words = f"{directory / file} belongs to uid {one.st_uid} and has mode {one.st_mode & 0o7777:04o}"
        if not stat.S_ISREG(one.st_mode) or one.st_uid not in (0, os.geteuid()) or one.st_mode & WRITABLE:
            return Openness(readable=True, changeable=True, reason=words)
        if one.st_mode & OPEN and not shut:
            readable = readable or words
    return Openness(readable=bool(readable), reason=readable)


def weak_files(manifest: Manifest) -> list[str]:
    """Return the files whose digests find damage, but no forgery."""
    return sorted(file.name for file in manifest.files if not file.digest.startswith(STRONG))


def require_trusted(image: Image, config: Config) -> Key:
    """Return the key that has signed the image; it and its place can be relied on. Raises Refused and OSError.

    The digests of an image of another node must hold against a forger, because other hands may have had the files.
    """
    advice = f"`kybernate import {image.path}` examines the image, and signs it if you confirm"
    signed = signature_of(image, ring_of(known_keys(config)))
    if signed.key is None:
        raise Refused(f"{image.path}: {signed.reason}", state="nothing was created", advice=advice)
    openness = openness_of(image.path, image.manifest, image.manifest_name)
    if openness.changeable:
        raise Refused(
            f"{image.path}: other users can change the image: {openness.reason}",
            state="nothing was created",
            advice=advice,
        )
    if signed.key.shared and (weak := weak_files(image.manifest)):
        raise Refused(
            f"{image.path}: {len(weak)} files, {weak[0]} among them, have digests that detect damage but not"
            " forgery, and a shared key has signed the image",
            state="nothing was created",
            advice=advice,
        )
    return signed.key


def require_named(image: Image, spec: Mapping[str, Any], config: Config) -> None:
    """Refuse a pod's image that lies where the shim does not take it for the pod's. Raises Refused.

    The new container of a pod's image has a tenant's rights, and so the place of the image counts.
    """
    requester = requester_of(Spec(spec))
    if not requester.is_tenant:
        return
    try:
        locate(Wanted(str(image.path), "kybernate restore"), requester, config)
    except (errors.Refused, CheckpointNotFound) as error:
        raise Refused(
            str(error), state="nothing was created", advice=f"`kybernate import {image.path}` moves it to its place"
        ) from error


def _key_file(path: Path, kind: KeyKind) -> KeyFile:
    try:
        return KeyFile(path, kind, read_key(path, shared=kind == "shared"))
    except errors.Refused as error:
        return KeyFile(path, kind, None, str(error))
