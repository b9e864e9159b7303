"""What can go wrong with the registry, as callers can react to it."""

from __future__ import annotations

from typing import Final

from kybernate.node.failure import Failure

REGISTRY_URL_INVALID_ADVICE: Final = "sqlite:////var/lib/kybernate/registry.db, or postgresql://USER@HOST/DATABASE"


class RegistryUnreachable(Failure):
    """The database does not answer, or refuses us. The images themselves are not affected."""

    advice = "look at the database's own log; checkpoints and restores by name need no registry"


REGISTRY_BUSY_ADVICE: Final = "try again; `fuser` shows which processes have the file open"


class RegistryDamaged(Failure):
    """The database contradicts itself, or is none."""

    advice = "move the database away, then `kybernate registry rebuild` makes it again from the images"


REGISTRY_TOO_NEW_ADVICE: Final = "use that release; or an empty database, and `kybernate registry rebuild`"


class ImageNotRegistered(Failure):
    """The registry has no such image."""

    advice = "`kybernate registry check` compares the registry with the images"


class ImageNotUnique(Failure):
    """Several images have the name, the id, or the beginning of the id; the message lists them."""

    advice = "name one of them by its id or its place, which is a directory or a URL"


class PageTokenInvalid(Failure):
    """The token of a page is not one of ours, or is one of another list."""

    advice = "begin with the first page"


class LabelInvalid(Failure):
    """A label that the registry does not accept."""


class NotKeptBeside(Failure):
    """Labels, pins or uses could not be written into the image's directory, so they would not survive the database."""

    advice = "look at the filesystem of the image (space, read-only)"
