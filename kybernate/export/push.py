"""An image to an image registry. Its tag is written last: it names a whole image, or what it named before.

Each layer is read twice: once for its digest, and once more where the registry does not have it. So nothing is stored
on the way, and an image that was pushed before, or in part, costs no transfer of what is there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from kybernate.export import documents
from kybernate.export.documents import CONFIG, MANIFEST, Descriptor, descriptor_of
from kybernate.export.layers import Compression, Layer, LayerStream, layers_of
from kybernate.export.reference import Reference
from kybernate.export.registry_client import Connection, ImageRegistryClient
from kybernate.export.upload import Sent, upload
from kybernate.node.failure import Failure
from kybernate.node.reading import OnProgress
from kybernate_shim.checkpoint.image.store import Image


@dataclass(frozen=True)
class Pushed:
    """A pushed image. Bytes are those of its layers as they are in the registry: sent, and there before."""

    reference: Reference
    layers: int
    sent_bytes: int
    known_bytes: int


def push(
    image: Image,
    reference: Reference,
    how: Connection,
    *,
    compression: Compression,
    progress: OnProgress = lambda done, total: None,
) -> Pushed:
    """Push the image and return the reference with its digest.

    Raises Failure, also where a file is not as the manifest lists it, Unavailable, and what `progress` raises. The
    reference then refers to what it did before.
    """
    layers = layers_of(image)
    count = _Count(2 * sum(layer.bytes for layer in layers), progress)
    with _client(reference, how) as client, ThreadPoolExecutor(how.parallel, "push") as pool:
        try:
            done = list(pool.map(lambda layer: _push_layer(client, layer, compression, count), layers))
            described = _push_documents(client, image, done)
        except BaseException:
            client.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    sizes: Counter[bool] = Counter()
    for layer in done:
        sizes[layer.sent == Sent.SENT] += layer.descriptor.size
    return Pushed(reference.at(described.digest), len(layers), sizes[True], sizes[False])


@dataclass(frozen=True)
class _PushedLayer:
    descriptor: Descriptor
    diff_id: str
    sent: Sent


def _push_layer(client: ImageRegistryClient, layer: Layer, compression: Compression, count: _Count) -> _PushedLayer:
    def running(size: int) -> None:
        client.require_running()
        count(size)

    first = LayerStream(layer, compression, running)
    for _ in first:
        pass
    assert first.descriptor is not None
    sent = upload(client, first.descriptor, lambda: LayerStream(layer, compression, running))
    if sent != Sent.SENT:
        count(layer.bytes)
    return _PushedLayer(first.descriptor, first.diff_id, sent)


def _push_documents(client: ImageRegistryClient, image: Image, layers: list[_PushedLayer]) -> Descriptor:
    """Push configuration and manifest, which make the layers an image."""
    settings = documents.config(image.manifest, [layer.diff_id for layer in layers])
    described = descriptor_of(settings, CONFIG)
    upload(client, described, lambda: iter((settings,)))
    manifest = documents.oci_manifest(image, described, [layer.descriptor for layer in layers])
    found = descriptor_of(manifest, MANIFEST)
    reference = client.reference
    if reference.digest and reference.digest != found.digest:
        raise Failure(f"{reference} is not the digest of this image, which is {found.digest}")
    client.put_manifest(manifest, MANIFEST, reference.tag or found.digest)
    return found


@contextmanager
def _client(reference: Reference, how: Connection) -> Iterator[ImageRegistryClient]:
    client = ImageRegistryClient(reference, how, push=True)
    try:
        yield client
    finally:
        client.close()


class _Count:
    """Sums what threads have done."""

    def __init__(self, total: int, progress: OnProgress) -> None:
        self._done, self._total, self._progress, self._lock = 0, total, progress, threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._done = min(self._total, self._done + size)
            done = self._done
        self._progress(done, self._total)
