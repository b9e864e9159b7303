"""The documents of a CRI checkpoint archive, made from an image's manifest: what containerd and `checkpointctl` read.

They hold what the manifest says, which is readable in an encrypted image, too. The container's configuration, with its
environment, is added only where it is not encrypted.
Sources: checkpointctl `lib/metadata.go`; containerd `internal/cri/server/container_checkpoint_linux.go`, releases 2.1
to 2.3; CRIU `images/stats.proto`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.criu.images import SERVICE, STATS
from kybernate_shim.checkpoint.image.manifest import Manifest, Source

CRI = "io.kubernetes.cri."
# What a kubelet compares or updates when it finds the container again; CRI only replaces those that are there.
KUBELETS = {
    "io.kubernetes.container.hash": "0",
    "io.kubernetes.container.restartCount": "0",
    "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
    "io.kubernetes.container.terminationMessagePolicy": "File",
    "io.kubernetes.pod.terminationGracePeriod": "30",
}
NANOSECONDS = 1_000_000_000


def name_of(source: Source) -> str:
    """Return what people call the container."""
    return source.name or source.container


def image_ref(source: Source) -> str:
    """Return the container image by its digest, as containerd pulls it: NAME@DIGEST; its name where that is unknown."""
    if not source.image_digest or source.image.startswith("sha256:"):
        return source.image
    repository = source.image.partition("@")[0]
    head, colon, tag = repository.rpartition(":")
    return f"{head if colon and '/' not in tag else repository}@{source.image_digest}"


def config_dump(manifest: Manifest) -> bytes:
    """Return `config.dump`: which container this is, and the container image below it."""
    source = manifest.source
    return _json(
        {
            "id": source.container,
            "name": name_of(source),
            "rootfsImage": source.image,
            "rootfsImageRef": image_ref(source),
            "rootfsImageName": source.image,
            "runtime": manifest.runtime.name,
            "createdTime": manifest.time,
            "checkpointedTime": manifest.time,
            "restoredTime": "0001-01-01T00:00:00Z",
            "restored": False,
        }
    )


def spec_dump(manifest: Manifest, spec: bytes | None) -> bytes:
    """Return `spec.dump`: the OCI configuration `spec` with the names by which `checkpointctl` shows the container.

    Without one, as for an encrypted image, it holds the names alone.
    """
    document = _parsed(spec)
    source = manifest.source
    names = {"container-name": name_of(source), "sandbox-name": source.pod, "sandbox-namespace": source.namespace}
    annotations = {f"{CRI}{name}": value for name, value in names.items() if value}
    return _json(
        {"ociVersion": "1.0.2", **document, "annotations": {**annotations, **(document.get("annotations") or {})}}
    )


def status_dump(manifest: Manifest) -> bytes:
    """Return `status.dump`: CRI's ContainerStatus, from which containerd takes labels and annotations."""
    source = manifest.source
    labels = {"container.name": source.name, "pod.name": source.pod, "pod.namespace": source.namespace, "pod.uid": "-"}
    return _json(
        {
            "id": source.container,
            "metadata": {"name": name_of(source)},
            "created_at": _nanoseconds(manifest),
            "started_at": _nanoseconds(manifest),
            "image": {"image": source.image, "user_specified_image": source.image},
            "image_ref": image_ref(source),
            "labels": {f"io.kubernetes.{name}": value for name, value in labels.items() if value},
            "annotations": KUBELETS,
        }
    )


def status_file(manifest: Manifest) -> bytes:
    """Return `status`: containerd's own note of the container's state."""
    when = _nanoseconds(manifest)
    return _json({"CreatedAt": when, "StartedAt": when, "FinishedAt": 0, "ExitCode": 0, "Pid": 0})


def stats_dump(manifest: Manifest) -> bytes:
    """Return `stats-dump`: CRIU's statistics, as far as the manifest has them: the dump's duration, and its pages."""
    frozen = sum(int(step.seconds * 1_000_000) for step in manifest.steps if step.name == "dump")
    pages = sum(file.size for file in manifest.files if file.name.startswith("pages-")) // manifest.host.page_size
    values = (0, frozen, 0, 0, pages, 0, pages, 0, 0)  # of fields 1 to 9, in the order of stats.proto
    dump = b"".join(_varint(number << 3) + _varint(value) for number, value in enumerate(values, 1))
    entry = b"\x0a" + _varint(len(dump)) + dump
    return struct.pack("<3I", SERVICE, STATS, len(entry)) + entry


def _nanoseconds(manifest: Manifest) -> int:
    return int(datetime.fromisoformat(manifest.time).timestamp()) * NANOSECONDS


def _parsed(spec: bytes | None) -> Mapping[str, Any]:
    try:
        document = bounded_json.parse(spec) if spec else {}
    except ValueError:  # a restore will say so; an export is of the bytes
        return {}
    known = isinstance(document, dict) and isinstance(document.get("annotations") or {}, dict)
    return document if known else {}


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode()
