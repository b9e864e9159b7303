"""From values to rows of tables and back, without a database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

from kybernate.registry.beside import annotations_document, decode_annotations
from kybernate.registry.model import (
    LARGEST,
    Annotations,
    Gpu,
    ImageRow,
    Replica,
    micros,
    moment,
    replica_key,
)
from kybernate.registry.schema import UNKNOWN_AGE, bounded
from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.image.manifest import Lineage, Source

Record = dict[str, Any]


def image_record(row: ImageRow) -> Record:
    """Return the row of an image; texts that are too long are shortened, as are numbers."""
    source = row.source
    return {
        "key": row.key,
        "id": bounded(row.id),
        "created": UNKNOWN_AGE if row.created is None else micros(row.created),
        "namespace": bounded(source.namespace),
        "pod": bounded(source.pod),
        "container": bounded(source.container),
        "name": bounded(source.name),
        "image": bounded(source.image),
        "image_digest": bounded(source.image_digest),
        "node": bounded(source.node),
        "bytes": min(row.bytes, LARGEST),
        "vram_bytes": min(row.vram_bytes, LARGEST),
        "encrypted": row.encrypted,
        "gpus": json.dumps([_gpu_document(gpu) for gpu in row.gpus]),
        "origin": bounded(row.lineage.origin),
        "pod_uid": bounded(row.lineage.pod_uid),
        **annotations_record(row),
    }


def _gpu_document(gpu: Gpu) -> list[str | int]:
    return [bounded(gpu.uuid), bounded(gpu.model), bounded(gpu.driver), gpu.bytes]


def annotations_record(row: ImageRow) -> Record:
    """Return the columns of an image that its manifest says nothing of, or not alone."""
    annotations = row.annotations
    text = json.dumps(annotations_document(annotations))
    return {
        "annotations": text,
        "revision": annotations.revision,
        "sum": sum_of(text),
        "pinned": annotations.pinned,
        "workload": bounded(row.workload),
        "parent": bounded(row.lineage.parent or annotations.parent),
        "generation": annotations.generation,
        "last_used": micros(annotations.last_used),
        "last_restore_seconds": annotations.last_restore_seconds,
    }


def label_records(key: str, annotations: Annotations) -> list[Record]:
    """Return the rows of an image's labels."""
    return [{"key": key, "name": name, "value": value} for name, value in sorted(annotations.labels.items())]


def replica_record(image: str, replica: Replica) -> Record:
    """Return the row of a replica of the image with that key."""
    return {
        "key": replica_key(replica.node, replica.place),
        "image": image,
        "node": replica.node,
        "place": replica.place,
        "tier": bounded(replica.tier),
        "name": bounded(replica.name),
        "state": replica.state,
        "bytes": min(replica.bytes, LARGEST),
        "verified": micros(replica.verified),
        "findings": json.dumps(list(replica.findings)),
        "reason": replica.reason,
        "revision": replica.revision,
    }


def image_of(row: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]]) -> ImageRow:
    """Return the image of a row, with its replicas in the order of nodes and places."""
    source = Source(
        row["container"], row["namespace"], row["pod"], row["name"], row["image"], row["image_digest"], row["node"]
    )
    return ImageRow(
        row["key"],
        row["id"],
        None if row["created"] == UNKNOWN_AGE else moment(row["created"]),
        source,
        row["bytes"],
        row["vram_bytes"],
        row["encrypted"],
        _gpus(row["gpus"]),
        known_annotations(row) or Annotations(),
        tuple(sorted(map(replica_of, replicas), key=lambda one: (one.node, one.place))),
        Lineage(row["origin"], row["parent"], row["pod_uid"]),
    )


def replica_of(row: Mapping[str, Any]) -> Replica:
    """Return the replica of a row."""
    return Replica(
        row["node"],
        row["place"],
        row["tier"],
        row["name"],
        row["state"],
        row["bytes"],
        moment(row["verified"]),
        _texts(row["findings"]),
        row["reason"],
        row["revision"],
    )


def known_annotations(record: Mapping[str, Any]) -> Annotations | None:
    """Return the annotations of an image's row, None where the row was damaged."""
    text = record["annotations"]
    if record["sum"] != sum_of(text):
        return None
    try:
        return decode_annotations(text)
    except ValueError:
        return None


def sum_of(text: str) -> str:
    """Return the sum of a row's annotations."""
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


@lru_cache(1024)  # a node has few GPUs, and many images of them
def _gpus(text: str) -> tuple[Gpu, ...]:
    try:
        return tuple(Gpu(uuid, model, driver, size) for uuid, model, driver, size in bounded_json.parse(text))
    except (ValueError, TypeError):
        return ()  # a damaged row, which a rebuild repairs


@lru_cache(1024)
def _texts(text: str) -> tuple[str, ...]:
    try:
        return tuple(map(str, bounded_json.parse(text)))
    except (ValueError, TypeError):
        return ()
