"""Writes container images: as OCI archives for `ctr images import`, and straight into an image registry's storage.

Source: OCI image specification 1.0 (layout, manifest, config); distribution's documentation of its filesystem driver.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGISTRY = "localhost:5000"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}
MEDIA = "application/vnd.oci.image."


@dataclass(frozen=True)
class Blob:
    """Bytes and what they are, as a descriptor names them."""

    media: str
    data: bytes

    @property
    def hex(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def digest(self) -> str:
        return f"sha256:{self.hex}"

    def descriptor(self, **more: Any) -> dict[str, Any]:
        return {"mediaType": MEDIA + self.media, "digest": self.digest, "size": len(self.data), **more}


@dataclass(frozen=True)
class Image:
    """One image of one layer; `blobs` are the layer, the config and the manifest, in this order."""

    name: str
    blobs: tuple[Blob, Blob, Blob]

    @property
    def reference(self) -> str:
        return f"{REGISTRY}/{self.name}:latest"

    @property
    def manifest(self) -> Blob:
        return self.blobs[2]


def image(name: str, layer: bytes, **config: Any) -> Image:
    """Return the image of `layer`, an uncompressed tar; `config` is what a container gets, such as Cmd and Env."""
    content = Blob("layer.v1.tar", layer)
    settings = Blob("config.v1+json", _json({
        "architecture": ARCHITECTURE[platform.machine()], "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [content.digest]},
        "history": [{"created_by": "the lab"}],
    }))  # fmt: skip
    manifest = Blob("manifest.v1+json", _json({
        "schemaVersion": 2, "mediaType": MEDIA + "manifest.v1+json",
        "config": settings.descriptor(), "layers": [content.descriptor()],
    }))  # fmt: skip
    return Image(name, (content, settings, manifest))


def write_archive(image: Image, path: Path) -> None:
    """Write `image` as a tar of an OCI layout that carries its full name."""
    names = {"io.containerd.image.name": image.reference, "org.opencontainers.image.ref.name": "latest"}
    index = {"schemaVersion": 2, "manifests": [image.manifest.descriptor(annotations=names)]}
    with tarfile.open(path, "w") as tar:
        add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        add(tar, "index.json", _json(index))
        for blob in image.blobs:
            add(tar, f"blobs/sha256/{blob.hex}", blob.data)


def write_registry(image: Image, storage: Path) -> None:
    """Put `image` where a registry that keeps its content under `storage` serves it, by tag and by digest."""
    top = storage / "docker/registry/v2"
    repository = top / "repositories" / image.name
    tag = repository / "_manifests/tags/latest"
    for blob in image.blobs:
        _put(top / "blobs/sha256" / blob.hex[:2] / blob.hex / "data", blob.data)
        if blob is not image.manifest:
            _put(repository / "_layers/sha256" / blob.hex / "link", blob.digest.encode())
    revisions = repository / "_manifests/revisions"
    for link in (revisions, tag / "index"):
        _put(link / "sha256" / image.manifest.hex / "link", image.manifest.digest.encode())
    _put(tag / "current/link", image.manifest.digest.encode())


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **fields: Any) -> None:
    """Add a member whose content and other fields depend on nothing but the arguments, so that digests repeat."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
