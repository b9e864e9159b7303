"""Images where pods may name them: below the checkpoint root, signed, and of the pods' namespace."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kybernate_shim.checkpoint.image.manifest import NAME, decode
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import write_manifest
from kybernate_shim.config import Config
from kybernate_shim.trust.keys import signing_key

ROOT = Path("/var/lib/kybernate/checkpoints")
_numbers = itertools.count(1)


@contextmanager
def pods_place(namespace: str = "default") -> Iterator[Path]:
    """Give a directory that pods of a namespace name by its last component; what comes into it is removed again."""
    place = ROOT / namespace / f"image{os.getpid()}-{next(_numbers)}"
    yield place
    shutil.rmtree(place, ignore_errors=True)


def sign_for(image: Path, namespace: str = "default") -> None:
    """Sign an image with the node's key as it is now, as one of the namespace's."""
    manifest = decode((image / NAME).read_bytes())
    manifest = replace(manifest, source=replace(manifest.source, namespace=namespace))
    write_manifest(image, sign(manifest, signing_key(Config.load())), durable=False)


def close_to_others(image: Path) -> None:
    """Give a copy of an image the modes that images have."""
    image.chmod(0o700)
    for path in image.iterdir():
        path.chmod(0o600)
