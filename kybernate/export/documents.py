"""The JSON documents of an OCI image, written from a checkpoint's manifest, and read from anywhere.

The image is one that containerd pulls, lists and unpacks, with `artifactType` for those who ask what it is. The
annotation `org.criu.checkpoint.container.name` is what containerd's CRI knows a checkpoint by.
Sources: OCI image specification 1.1; checkpointctl `lib/annotations.go`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from kybernate.export.cri_documents import image_ref, name_of
from kybernate.node.failure import Failure
from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.image.manifest import Manifest
from kybernate_shim.checkpoint.image.store import Image

OCI = "application/vnd.oci.image."
INDEX, MANIFEST = f"{OCI}index.v1+json", f"{OCI}manifest.v1+json"
CONFIG, LAYER = f"{OCI}config.v1+json", f"{OCI}layer.v1.tar"
ARTEFACT = "application/vnd.kybernate.checkpoint.v1"
CRIU = "org.criu.checkpoint."
OURS = "io.kybernate.checkpoint."
TITLE = "org.opencontainers.image.title"  # the image's name on the node that has pushed it
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MOST_DOCUMENT = 4 << 20  # bytes of a manifest or an index, as registries have it
MOST_LAYERS = 1000
MOST_BLOB = 1 << 50


class ArtefactInvalid(Failure):
    """What was read is not a checkpoint image that an export has written, or it was changed in transit."""

    advice = "nothing of it was kept; push or export the image again where it is whole"


@dataclass(frozen=True)
class Descriptor:
    """What a blob is, its digest, `sha256:<hex>`, and its size in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, compare=False)

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        found: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return found | ({"annotations": dict(self.annotations)} if self.annotations else {})


def descriptor_of(content: bytes, media_type: str) -> Descriptor:
    """Describe a document."""
    return Descriptor(media_type, f"sha256:{sha256(content).hexdigest()}", len(content))


def config(manifest: Manifest, diff_ids: Sequence[str]) -> bytes:
    """Return the image's configuration, from which containerd takes the platform and the order of the layers."""
    return encode(
        {
            "architecture": ARCHITECTURES.get(manifest.host.architecture, manifest.host.architecture),
            "os": "linux",
            "created": manifest.time,
            "config": {"Labels": notes_of(manifest)},
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
            "history": [{"created": manifest.time, "created_by": "kybernate"} for _ in diff_ids],
        }
    )


def oci_manifest(image: Image, config: Descriptor, layers: Sequence[Descriptor]) -> bytes:
    """Return the manifest of the OCI image."""
    notes = notes_of(image.manifest) | {f"{OURS}manifest": image.digest, TITLE: image.path.name}
    return encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": ARTEFACT,
            "config": config.document(),
            "layers": [layer.document() for layer in layers],
            "annotations": notes,
        }
    )


def index(manifest: Descriptor, name: str) -> bytes:
    """Return the index of a layout whose only image has a name: a tag, or a whole reference."""
    tag = name.rpartition(":")[2] if "/" in name else name
    names = {"org.opencontainers.image.ref.name": tag} | ({"io.containerd.image.name": name} if "/" in name else {})
    described = manifest.document() | {"artifactType": ARTEFACT, "annotations": names}
    return encode({"schemaVersion": 2, "mediaType": INDEX, "manifests": [described]})


def notes_of(manifest: Manifest) -> dict[str, str]:
    """Return what is known of the checkpoint, in the words of CRIU's own annotations; no secret is among it."""
    source = manifest.source
    found = {
        f"{CRIU}engine.name": "containerd",
        f"{CRIU}container.name": name_of(source),
        f"{CRIU}pod.name": source.pod,
        f"{CRIU}pod.namespace": source.namespace,
        f"{CRIU}rootfsImageName": source.image,
        f"{CRIU}rootfsImageUserRequested": source.image,
        f"{CRIU}rootfsImageID": image_ref(source),
        f"{CRIU}runtime.name": manifest.runtime.name,
        f"{CRIU}runtime.version": manifest.runtime.version,
        f"{CRIU}criu.version": manifest.criu.version,
        f"{CRIU}host.arch": manifest.host.architecture,
        f"{CRIU}host.kernel": manifest.host.kernel,
        f"{CRIU}cgroup.version": f"v{manifest.host.cgroup_version}",
        f"{OURS}id": manifest.id,
        f"{OURS}bytes": str(manifest.bytes),
        f"{OURS}encrypted": str(manifest.encryption is not None).lower(),
        "org.opencontainers.image.created": manifest.time,
    }
    return {name: value for name, value in found.items() if value}


def encode(document: Any) -> bytes:
    """Return the document so that equal ones are equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class ReadManifest:
    """An OCI manifest from elsewhere: its layers in order, and what it says of itself."""

    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]

    @property
    def bytes(self) -> int:
        return sum(layer.size for layer in self.layers)


def read_manifest(content: bytes) -> ReadManifest:
    """Read the manifest of an exported checkpoint. Raises ArtefactInvalid."""
    document = _document(content)
    notes = document.get("annotations") or {}
    if not isinstance(notes, dict) or f"{OURS}manifest" not in notes:
        raise ArtefactInvalid("it is an image, but not a checkpoint that `kybernate push` or `export` has written")
    layers = document.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MOST_LAYERS:
        raise ArtefactInvalid("its manifest lists no layers, or too many")
    return ReadManifest(tuple(map(_descriptor, layers)), {str(key): str(value) for key, value in notes.items()})


def chosen(content: bytes, name: str = "") -> Descriptor | None:
    """Return the checkpoint's manifest of an index, None where `content` is no index. Raises ArtefactInvalid.

    `name` is needed where the index has several.
    """
    document = _document(content)
    if "manifests" not in document:
        return None
    listed = document["manifests"]
    if not isinstance(listed, list) or len(listed) > MOST_LAYERS:
        raise ArtefactInvalid("its index cannot be read")
    found = [one for one in map(_descriptor, listed) if one.media_type == MANIFEST]
    if name:
        found = [one for one in found if name in _names(one)]
    if len(found) != 1:
        raise ArtefactInvalid(f"its index has {len(found)} images{f' of the name {name}' if name else ''}, and not one")
    return found[0]


def _names(one: Descriptor) -> tuple[str, ...]:
    return tuple(
        one.annotations.get(key, "") for key in ("org.opencontainers.image.ref.name", "io.containerd.image.name")
    )


def _document(content: bytes) -> dict[str, Any]:
    try:
        document = bounded_json.parse(content)
    except ValueError as error:
        raise ArtefactInvalid("its manifest is not JSON") from error
    if not isinstance(document, dict):
        raise ArtefactInvalid("its manifest is not an OCI document")
    return document


def _descriptor(one: Any) -> Descriptor:
    fields = one if isinstance(one, dict) else {}
    media, digest, size, notes = (fields.get(key) for key in ("mediaType", "digest", "size", "annotations"))
    if not (isinstance(media, str) and isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise ArtefactInvalid("its manifest has a blob without a type or a SHA-256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST_BLOB:
        raise ArtefactInvalid(f"its manifest has a blob of {size} bytes")
    notes = notes if isinstance(notes, dict) else {}
    return Descriptor(media, digest, size, {str(key): str(value) for key, value in notes.items()})
