"""Which directory a container's request for an image means, and whether the container's author may name it.

A tenant names an image by name. It is opened below `checkpoint_root/<namespace of the pod>`, or where the agent keeps a
copy of it in memory, without following links and without `..`. The kernel resolves the name (openat2), so no check can
differ from the use. A path is accepted only below one of the node's `trusted_roots`. The directories above must be
root's own: then nothing that was checked can be replaced before CRIU reads it.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

from kybernate_shim.checkpoint.image.copies import root_of
from kybernate_shim.checkpoint.image.requested import Wanted
from kybernate_shim.config import Config
from kybernate_shim.errors import Missing, Refused
from kybernate_shim.linux.openat2 import RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, openat2
from kybernate_shim.run_directory import ARRIVING
from kybernate_shim.trust.places import require_private
from kybernate_shim.trust.requester import Requester
from kybernate_shim.trust.rights import Right, may

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,254}){0,7}")
NAMESPACE: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # a DNS label, as Kubernetes has it
BENEATH: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS


def locate(wanted: Wanted, requester: Requester, config: Config) -> Path:
    """Return the directory of the image that is wanted, whether it holds one or not.

    For a tenant it is a directory that only root can write, and was found without links. Raises Refused, and for a
    tenant CheckpointNotFound where there is no such directory.
    """
    if may(requester, Right.ANY_PATH, config):
        return root_of(wanted.name, config) / wanted.name
    root, name = _root_and_name(wanted, requester, config)
    if not NAME.fullmatch(name):
        raise Refused(
            f"{wanted.by}: {shown(wanted.name)} is not the name of an image: letters, digits, `.`, `_` and `-`,"
            " in parts that begin with a letter or a digit. Nothing was restored"
        )
    try:
        require_private(root)
        _require_found(root, name)
    except FileNotFoundError:
        raise _missing(root / name, name, wanted, requester, config) from None
    return root / name


def shown(name: str) -> str:
    """Return a name of a tenant's choice for a message: of bounded length, and on one line."""
    return ascii(name if len(name) <= 200 else f"{name[:200]}…")


def namespace_root(config: Config, namespace: str) -> Path:
    """Return the directory of all images of one Kubernetes namespace. Raises Refused for no namespace."""
    if not NAMESPACE.fullmatch(namespace):
        raise Refused(f"{namespace!r} is not the name of a Kubernetes namespace. Nothing was restored")
    return config.checkpoint_root / namespace


def _root_and_name(wanted: Wanted, requester: Requester, config: Config) -> tuple[Path, str]:
    own = namespace_root(config, requester.namespace)
    if not wanted.name.startswith("/"):
        known = NAME.fullmatch(wanted.name) is not None
        return (root_of(f"{own.name}/{wanted.name}", config) / own.name if known else own), wanted.name
    # A path that is no pod's is of root's choice: `kybernate restore` names the image so.
    for root in (*config.trusted_roots, *(() if requester.sandbox else (ARRIVING, own))):
        if wanted.name.startswith(f"{root}/"):
            return root, wanted.name[len(str(root)) + 1 :]
    raise Refused(
        f"{wanted.by}: {requester} names the image by the path {shown(wanted.name)}; pods name images by their name"
        f" below {own}. Use the name, or have the node's administrator move the image there (`kybernate import`) or add"
        " its directory to `trusted_roots`. Nothing was restored"
    )


def _require_found(root: Path, name: str) -> None:
    """Open every directory of `name` without links, and refuse one that another user can write."""
    base = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            _require_own_directory(base, "/".join(parts[:depth]), root)
    finally:
        os.close(base)


def _require_own_directory(base: int, name: str, root: Path) -> None:
    try:
        fd = openat2(base, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, BENEATH)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV):
            raise Refused(f"{root / name} is a link or not a directory. Nothing was restored") from error
        raise
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Refused(
            f"{root / name} belongs to uid {status.st_uid} and has mode {status.st_mode & 0o7777:04o}: an image must"
            " belong to root, and no other user may write to it. `kybernate doctor` shows such places. Nothing was"
            " restored"
        )


def _missing(path: Path, name: str, wanted: Wanted, requester: Requester, config: Config) -> Missing:
    """Explain that there is no such image; one that is in no namespace's directory is named with the remedy."""
    from kybernate_shim.checkpoint.image.store import CheckpointNotFound

    old = config.checkpoint_root / name
    advice = ""
    if "/" not in name and old != path and _is_of(old, requester.namespace):
        advice = (
            f". There is an image {old}, which is in no namespace's directory: the node's administrator can"
            f" give it to this namespace with `kybernate import {old} --namespace {requester.namespace}`"
        )
    return CheckpointNotFound(f"{wanted.by}: {path}: no such directory{advice}. Nothing was restored")


def _is_of(directory: Path, namespace: str) -> bool:
    """Return whether there is an image that says to be of the namespace: no pod learns of another one's."""
    from kybernate_shim.checkpoint.image.store import CheckpointInvalid, CheckpointNotFound, read_image

    try:
        return read_image(directory).manifest.source.namespace == namespace
    except (CheckpointInvalid, CheckpointNotFound, OSError):
        return False
