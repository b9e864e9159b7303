"""What can go wrong with the registry, as callers can react to it."""

from __future__ import annotations

from typing import Final

from kybernate.node.failure import Failure

REGISTRY_URL_INVALID_ADVICE: Final = "sqlite:////var/lib/kybernate/registry.db, or postgresql://USER@HOST/DATABASE"
REGISTRY_UNREACHABLE_ADVICE: Final = "look at the database's own log; checkpoints and restores by name need no registry"
REGISTRY_BUSY_ADVICE: Final = "try again; `fuser` shows which processes have the file open"
REGISTRY_TOO_NEW_ADVICE: Final = "use that release; or an empty database, and `kybernate registry rebuild`"
IMAGE_NOT_REGISTERED_ADVICE: Final = "`kybernate registry check` compares the registry with the images"


class RegistryDamaged(Failure):
    """The database contradicts itself, or is none."""

    advice = "move the database away, then `kybernate registry rebuild` makes it again from the images"


class NotKeptBeside(Failure):
    """Labels, pins or uses could not be written into the image's directory, so they would not survive the database."""

    advice = "look at the filesystem of the image (space, read-only)"
