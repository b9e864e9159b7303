"""The staging directory of an image: closed to other users, and as it was before when the image fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.image.store import LOGS, CheckpointInvalid
from kybernate_shim.trust.places import close_to_others, make_private

INVENTORY = "inventory.img"  # every dump of CRIU's has one


@contextmanager
def staged(directory: Path, last_copy: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Make the directory for an image; when the block fails, remove it, or what has come into it meanwhile.

    What is the `last_copy` of a container by then stays, finished or not. Logs stay in a directory that was there
    before, so that the failure can be analysed. Raises CheckpointInvalid when it holds an image already, Refused
    when other users can write to it or read it, and OSError.
    """
    made = make_private(directory)
    before = {path.name for path in directory.iterdir()}
    if before & {NAME, INVENTORY}:
        raise CheckpointInvalid(
            f"{directory}: contains a checkpoint image already; remove it or choose another directory"
        )
    close_to_others(directory, empty=all(name.endswith(LOGS) for name in before))
    try:
        yield
    except BaseException:
        if last_copy():
            raise
        if made:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            _remove(path for path in directory.iterdir() if path.name not in before and path.suffix != LOGS)
        raise


def _remove(paths: Iterator[Path]) -> None:
    """Remove files, the manifest first: without it, the rest is not taken for an image."""
    for path in sorted(paths, key=lambda path: path.name != NAME):
        path.unlink(missing_ok=True)
