"""Whether an image may be restored for a requester: which key signed it, whose it is, how strong its digests are."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.signature import signer_of
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from kybernate_shim.errors import Refused
from kybernate_shim.logs import Log
from kybernate_shim.trust.keys import Key, verifying_keys
from kybernate_shim.trust.requester import Requester
from kybernate_shim.trust.rights import Right, may

STRONG: Final = ("blake3", "blake2b", "sha256")  # prefixes of digests to which no other content can be made


def require_genuine(image: Image, requester: Requester, config: Config, log: Log, *, carried: bool = False) -> None:
    """Refuse an image that `requester` may not restore.

    `carried`: containerd has unpacked it from what a client named, so the files themselves may be of the requester's
    making. Raises Refused.
    """
    ring = verifying_keys(config)
    for why in ring.unusable:
        log.warning("key.rejected", error=why)
    try:
        key = signer_of(image.content, image.manifest, ring)
    except Refused as error:
        if may(requester, Right.UNSIGNED, config):
            log.warning("image.accepted_unsigned", path=str(image.path), error=str(error))
            return
        raise Refused(
            f"{image.path}: {error}. {requester} may restore images of this node's keys only: the node's administrator"
            f" can examine and sign it with `kybernate import {image.path}`. Nothing was restored"
        ) from None
    if not may(requester, Right.ANY_NAMESPACE, config):
        _require_own(image, requester)
        _require_strong(image, key, carried=carried)
        if not carried:
            _require_private_files(image)


def _require_own(image: Image, requester: Requester) -> None:
    namespace = image.manifest.source.namespace
    if not namespace or namespace != requester.namespace:
        raise Refused(
            f"{image.path} is an image of {f'namespace {namespace}' if namespace else 'no namespace'}, and"
            f" {requester} is"
            " not in it. Nothing was restored"
        )


def _require_strong(image: Image, key: Key, *, carried: bool) -> None:
    """Require digests that hold against a forger, for an image that other hands than this node's root may have had.

    A fast digest finds damage. It is enough for an image of the node's own key in a directory that only root can write.
    """
    if not (key.shared or carried):
        return
    weak = sorted({file.name for file in image.manifest.files if not file.digest.startswith(STRONG)})
    if weak:
        raise Refused(
            f"{image.path}: {len(weak)} files, {weak[0]} among them, have digests that detect damage but not"
            " forgery, and"
            " the image comes from elsewhere. `kybernate import` computes strong ones. Nothing was restored"
        )


def _require_private_files(image: Image) -> None:
    """Require that no other user can change a file between its check and its use."""
    for name in (image.manifest_name, *(file.name for file in image.manifest.stored_files)):
        status = (image.path / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise Refused(
                f"{Path(image.path, name)} belongs to uid {status.st_uid} and has mode {status.st_mode & 0o7777:04o}:"
                " only root may be able to write an image. `kybernate doctor --fix` repairs modes. Nothing was restored"
            )
