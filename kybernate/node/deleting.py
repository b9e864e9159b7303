"""Delete a checkpoint image: at one moment it is there as a whole, at the next it does not exist."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kybernate.node.failure import Failure, Refused
from kybernate_shim.checkpoint.image.copies import root_of
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.config import Config
from kybernate_shim.linux.atomic_write import sync
from kybernate_shim.linux.locks import held, try_lock_directory

TRASH = ".deleted-"  # begins the name of a directory whose image is being deleted; no list of images shows it


def delete(image: Path, name: str) -> None:
    """Delete the image in the directory `image`. Raises Failure, Refused.

    The directory is first renamed: `name` makes that name unique, and a second call with it completes what a crash has
    left. What an earlier call has deleted is no error then.
    """
    trash = trash_of(image, name)
    try:
        if os.path.lexists(image / NAME) and not trash.exists():
            with held(try_lock_directory(image)) as unused:
                if not unused:
                    raise Refused(
                        f"{image} is in use", state="it is as it was", advice="try again when it has been read"
                    )
                image.rename(trash)
            sync(image.parent)
        if trash.exists():
            shutil.rmtree(trash)
            sync(image.parent)
    except OSError as error:
        state = (
            "it is no longer an image, but not all of its files are removed" if trash.exists() else "it is as it was"
        )
        raise Failure(f"{image} cannot be deleted: {error}", state=state) from error


def delete_with_copy(image: Path, name: str, config: Config) -> None:
    """Delete an image and its copy in memory, which would else take its place. Raises as `delete`."""
    memory, root = config.memory_root, config.checkpoint_root
    if memory is not None and image.is_relative_to(root):
        copy = memory / image.relative_to(root)
        if root_of(str(image.relative_to(root)), config) == memory or trash_of(copy, name).exists():
            delete(copy, name)
    delete(image, name)


def trash_of(image: Path, name: str) -> Path:
    """Return where the files of an image are while they are deleted."""
    return image.with_name(f"{TRASH}{name}")
