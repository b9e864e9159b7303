"""A checkpoint image of a size that matters: a signed manifest with real digests of random bytes, zeros and a hole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import NAME, Manifest, Source, encode
from kybernate_shim.linux.private_files import write_private
from tests.fakes.images import PATTERN

MIB = 1 << 20


def write_sized_image(directory: Path, *, id: str, mib: int, namespace: str = "team-a") -> Manifest:
    """Write an image with `mib` MiB of random bytes in one file, and some smaller files, into a new directory."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700)
    write_private(directory / "core-1.img", os.urandom(5000))
    write_private(directory / "empty.img", b"")
    with (directory / "pages-1.img").open("wb") as stream:
        for _ in range(mib):
            stream.write(os.urandom(MIB))
        stream.write(b"the end")
    with (directory / "zeros.img").open("wb") as stream:
        stream.write(b"begin" + bytes(3 * MIB))
        stream.truncate(9 * MIB + 11)
    names = sorted(path.name for path in directory.iterdir())
    with Digester("xxh128") as digester:
        files = digester.files(directory, names)
    manifest = replace(PATTERN, id=id, source=Source("c1", namespace=namespace), files=files)
    write_private(directory / NAME, encode(manifest))
    return manifest


def contents(directory: Path) -> dict[str, bytes]:
    """Return all files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}
