"""Images that only a test has a use for, made and imported on the spot."""

from __future__ import annotations

import io
import json
import platform
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab import oci
from tests.system.ctr import run


def layer(files: Mapping[str, bytes]) -> oci.Blob:
    """Return a layer that holds `files`, all of them executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            oci.add(tar, name, content, mode=0o755)
    return oci.Blob("layer.v1.tar", buffer.getvalue())


@contextmanager
def imported(name: str, layers: Sequence[oci.Blob], directory: Path) -> Iterator[str]:
    """Import an image of `layers`, lowest first, and yield its reference; `directory` is scratch space."""
    reference = f"{oci.REGISTRY}/{name}:latest"
    config = _blob(
        "config.v1+json",
        architecture=oci.ARCHITECTURE[platform.machine()],
        os="linux",
        config={"Env": ["PATH=/bin"]},
        rootfs={"type": "layers", "diff_ids": [layer.digest for layer in layers]},
    )
    manifest = _blob(
        "manifest.v1+json",
        schemaVersion=2,
        mediaType=f"{oci.MEDIA}manifest.v1+json",
        config=config.descriptor(),
        layers=[layer.descriptor() for layer in layers],
    )
    archive = directory / f"{name}.tar"
    _write(archive, manifest, [*layers, config, manifest], reference)
    run(["ctr", "images", "import", str(archive)], timeout=120)
    try:
        yield reference
    finally:
        run(["ctr", "images", "rm", reference])


def _write(path: Path, manifest: oci.Blob, blobs: Sequence[oci.Blob], reference: str) -> None:
    annotations = {"io.containerd.image.name": reference}
    index = {"schemaVersion": 2, "manifests": [manifest.descriptor(annotations=annotations)]}
    with tarfile.open(path, "w") as tar:
        oci.add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        oci.add(tar, "index.json", json.dumps(index).encode())
        for blob in {blob.digest: blob for blob in blobs}.values():
            oci.add(tar, f"blobs/sha256/{blob.hex}", blob.data)


def _blob(media: str, **content: Any) -> oci.Blob:
    return oci.Blob(media, json.dumps(content).encode())


@contextmanager
def removed(*references: str, namespace: str = "default") -> Iterator[None]:
    """Remove images from containerd afterwards, with what belongs to them alone."""
    try:
        yield
    finally:
        for reference in references:
            run(["ctr", "-n", namespace, "images", "rm", "--sync", reference], status=None)
