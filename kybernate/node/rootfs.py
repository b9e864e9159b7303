"""A container image's layers as a root filesystem: what containerd's clients do before they create a container.

Source: image-spec "Image Layout", "Layer ChainID"; containerd's docs/garbage-collection.md.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kybernate.messages import (
    content_pb2,
    content_pb2_grpc,
    diff_pb2,
    diff_pb2_grpc,
    images_pb2,
    images_pb2_grpc,
    leases_pb2,
    leases_pb2_grpc,
    snapshots_pb2,
    snapshots_pb2_grpc,
)
from kybernate.node.containerd import Containerd, ContainerdRefused, metadata, translated
from kybernate.node.failure import Failure
from kybernate_shim import bounded_json
from kybernate_shim.messages.types_pb2 import Descriptor, Mount

LEASE_SECONDS = 3600  # containerd collects what a killed client leaves behind after this
UNPACK_SECONDS = 600.0
MOST_DOCUMENT = 16 << 20  # bytes of an index, a manifest or a configuration
GO_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}


@dataclass(frozen=True)
class Layer:
    """A layer: its blob, and the name of the snapshot that holds it and all below it."""

    blob: Descriptor
    chain: str


@dataclass(frozen=True)
class SnapshotPlace:
    """Where in containerd something is made."""

    containerd: Containerd
    namespace: str
    snapshotter: str
    lease: str = ""


@contextmanager
def lease(containerd: Containerd, namespace: str) -> Iterator[str]:
    """Keep containerd's garbage collector away from what is created under the lease, until something refers to it."""
    stub = leases_pb2_grpc.LeasesStub(containerd.channel)
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + LEASE_SECONDS))
    request = leases_pb2.CreateRequest(id=f"kybernate-{uuid4().hex}", labels={"containerd.io/gc.expire": expires})
    id = containerd.call(stub.Create, request, namespace=namespace).lease.id
    try:
        yield id
    finally:
        containerd.call(stub.Delete, leases_pb2.DeleteRequest(id=id), namespace=namespace)


def prepare(place: SnapshotPlace, image: str, key: str, labels: Mapping[str, str] | None = None) -> list[Mount]:
    """Make the active snapshot `key` on top of `image` and return its mounts; unpack layers that no snapshot holds yet.

    Raises Failure; ContainerdRefused with code ALREADY_EXISTS where the key is taken.
    """
    parent = ""
    for layer in layers(place, image):
        if not _exists(place, layer.chain):
            _unpack(place, layer, parent)
        parent = layer.chain
    return _prepared(place, key, parent, labels)


def remove(place: SnapshotPlace, key: str) -> None:
    """Remove the snapshot `key`; one that is gone is fine."""
    stub = snapshots_pb2_grpc.SnapshotsStub(place.containerd.channel)
    request = snapshots_pb2.RemoveSnapshotRequest(snapshotter=place.snapshotter, key=key)
    try:
        place.containerd.call(stub.Remove, request, namespace=place.namespace)
    except ContainerdRefused as error:
        if error.code != "NOT_FOUND":
            raise


def labels_of(place: SnapshotPlace, key: str) -> Mapping[str, str] | None:
    """Return the labels of the snapshot `key`; None where there is no such snapshot."""
    stub = snapshots_pb2_grpc.SnapshotsStub(place.containerd.channel)
    request = snapshots_pb2.StatSnapshotRequest(snapshotter=place.snapshotter, key=key)
    try:
        return dict(place.containerd.call(stub.Stat, request, namespace=place.namespace).info.labels)
    except ContainerdRefused as error:
        if error.code != "NOT_FOUND":
            raise
        return None


def layers(place: SnapshotPlace, image: str) -> list[Layer]:
    """Return the image's layers for this machine, the lowest first. Raises Failure."""
    stub = images_pb2_grpc.ImagesStub(place.containerd.channel)
    try:
        found = place.containerd.call(stub.Get, images_pb2.GetImageRequest(name=image), namespace=place.namespace)
        manifest = _manifest(place, found.image.target, image)
        diffs = _blob(place, manifest["config"]["digest"])["rootfs"]["diff_ids"]
    except ContainerdRefused as error:
        if error.code != "NOT_FOUND":
            raise
        raise Failure(
            f"image {image} is not in containerd's namespace {place.namespace}: {error}",
            advice=f"`ctr -n {place.namespace} images pull {image}`, or name another with --image",
        ) from error
    blobs = [_descriptor(entry) for entry in manifest["layers"]]
    return [Layer(blob, chain) for blob, chain in zip(blobs, chains(diffs), strict=True)]


def chains(diffs: Sequence[str]) -> Iterator[str]:
    """Yield the name of each layer's snapshot from the digests of the layers' uncompressed content."""
    chain = ""
    for diff in diffs:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff}'.encode()).hexdigest()}" if chain else diff
        yield chain


def select(manifests: Sequence[dict[str, Any]], architecture: str) -> dict[str, Any] | None:
    """Return the entry of an index for Linux on `architecture`, by Go's name of it."""
    for entry in manifests:
        platform = entry.get("platform") or {}
        if (platform.get("os", "linux"), platform.get("architecture", architecture)) == ("linux", architecture):
            return entry
    return None


def _manifest(place: SnapshotPlace, target: Descriptor, image: str) -> dict[str, Any]:
    document = _blob(place, target.digest)
    if "manifests" not in document:
        return document
    architecture = GO_ARCHITECTURES.get(platform.machine(), platform.machine())
    entry = select(document["manifests"], architecture)
    if entry is None:
        raise Failure(f"image {image} has nothing for {architecture}, the architecture of this machine")
    return _blob(place, entry["digest"])


def _blob(place: SnapshotPlace, digest: str) -> dict[str, Any]:
    stub = content_pb2_grpc.ContentStub(place.containerd.channel)
    with translated(place.containerd.address):
        request = content_pb2.ReadContentRequest(digest=digest)
        content = bytearray()
        parts = stub.Read(request, metadata=metadata(place.namespace))
        for part in parts:
            content += part.data
            if len(content) > MOST_DOCUMENT:
                parts.cancel()
                break
    try:
        document = bounded_json.parse(content, most_bytes=MOST_DOCUMENT)
    except ValueError as error:
        raise Failure(f"{digest}, of the container image, cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise Failure(f"{digest}, of the container image, is not a document of an image")
    return document


def _descriptor(entry: dict[str, Any]) -> Descriptor:
    return Descriptor(media_type=entry["mediaType"], digest=entry["digest"], size=entry["size"])


def _exists(place: SnapshotPlace, name: str) -> bool:
    return labels_of(place, name) is not None


def _prepared(place: SnapshotPlace, key: str, parent: str, labels: Mapping[str, str] | None = None) -> list[Mount]:
    stub = snapshots_pb2_grpc.SnapshotsStub(place.containerd.channel)
    request = snapshots_pb2.PrepareSnapshotRequest(snapshotter=place.snapshotter, key=key, parent=parent, labels=labels)
    return list(place.containerd.call(stub.Prepare, request, namespace=place.namespace, lease=place.lease).mounts)


def _unpack(place: SnapshotPlace, layer: Layer, parent: str) -> None:
    """Make the snapshot of one layer. Another client may do the same concurrently; the first one wins."""
    key = f"extract-{uuid4().hex} {layer.chain}"
    mounts = _prepared(place, key, parent)
    channel = place.containerd.channel
    try:
        place.containerd.call(
            diff_pb2_grpc.DiffStub(channel).Apply,
            diff_pb2.ApplyRequest(diff=layer.blob, mounts=mounts),
            namespace=place.namespace,
            lease=place.lease,
            timeout=UNPACK_SECONDS,
        )
        place.containerd.call(
            snapshots_pb2_grpc.SnapshotsStub(channel).Commit,
            snapshots_pb2.CommitSnapshotRequest(snapshotter=place.snapshotter, name=layer.chain, key=key),
            namespace=place.namespace,
            lease=place.lease,
        )
    except BaseException as error:
        remove(place, key)
        if not (isinstance(error, ContainerdRefused) and error.code == "ALREADY_EXISTS"):
            raise
