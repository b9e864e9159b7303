"""What the registry keeps with an image: labels, pins, uses and lineage, which no manifest says.

`kybernate-registry.json` lies in the image's directory, so it moves and vanishes with the image. It is no part of the
image: no digest covers it, and an import leaves it behind. It counts only where it is root's own, writable by no other
user, and names the image's id. It is replaced in one step, and is on the disk before a change is acknowledged.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kybernate.node.failure import Invalid
from kybernate.registry.failures import NotKeptBeside
from kybernate.registry.model import LARGEST, Annotations, require_labels
from kybernate_shim import bounded_json
from kybernate_shim.checkpoint.image.codec import field_invalid, from_json, parse
from kybernate_shim.checkpoint.image.manifest import REGISTRY, REGISTRY_STAGING
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.linux.plain_files import open_plain

FORMAT = 1
MOST_BYTES = 128 << 10
WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Beside:
    """The file's content. `image` is the manifest's id; `verified` and `damage` are of this replica alone.

    `damage` is what the last comparison of all digests found, "" where it found none.
    """

    image: str
    annotations: Annotations = field(default_factory=Annotations)
    verified: datetime | None = None
    damage: str = ""


@dataclass(frozen=True)
class _Label:
    name: str
    value: str


@dataclass(frozen=True)
class _Document:
    """The file's fields; times are RFC 3339, "" for none."""

    image: str
    revision: int = 0
    labels: tuple[_Label, ...] = ()
    pinned: bool = False
    last_used: str = ""
    last_restore_seconds: float = 0.0
    workload: str = ""
    parent: str = ""
    generation: int | None = None
    verified: str = ""
    damage: str = ""
    format: int = FORMAT


def encode(beside: Beside) -> bytes:
    """Return the file's content, always the same for the same values."""
    kept = beside.annotations
    document = {
        "format": FORMAT,
        "image": beside.image,
        **annotations_document(kept),
        "verified": _text(beside.verified),
        "damage": beside.damage,
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def annotations_document(kept: Annotations) -> dict[str, Any]:
    """Return the annotations as JSON has them, in a fixed order."""
    return {
        "revision": kept.revision,
        "labels": [{"name": name, "value": value} for name, value in sorted(kept.labels.items())],
        "pinned": kept.pinned,
        "last_used": _text(kept.last_used),
        "last_restore_seconds": kept.last_restore_seconds,
        "workload": kept.workload,
        "parent": kept.parent,
        "generation": kept.generation,
    }


def decode(content: bytes) -> Beside:
    """Return what `encode` wrote. Raises ValueError; `content` may come from anywhere."""
    try:
        value = parse(content)
        format = value.get("format") if isinstance(value, dict) else None
        if isinstance(format, int) and format != FORMAT:
            raise ValueError(f"format {format} is not understood, only {FORMAT} is")
        document = from_json(_Document, value)
        return Beside(document.image, _annotations(document), _time(document.verified), document.damage)
    except (ValueError, Invalid, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def decode_annotations(text: str) -> Annotations:
    """Return the annotations of a text whose sum has shown that it is one of ours. Raises ValueError."""
    try:
        document = bounded_json.parse(text)
        return Annotations(
            document["revision"],
            {label["name"]: label["value"] for label in document["labels"]},
            document.get("pinned", False),
            _time(document.get("last_used", "")),
            document.get("last_restore_seconds", 0.0),
            document.get("workload", ""),
            document.get("parent", ""),
            document.get("generation"),
        )
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _annotations(document: _Document) -> Annotations:
    labels = {label.name: label.value for label in document.labels}
    require_labels(labels)
    if max(document.revision, document.generation or 0) > LARGEST:
        raise field_invalid("revision", f"more than {LARGEST}")
    return Annotations(
        document.revision,
        labels,
        document.pinned,
        _time(document.last_used),
        document.last_restore_seconds,
        document.workload,
        document.parent,
        document.generation,
    )


def read(directory: Path) -> Beside | None:
    """Return what is kept with an image, None where nothing does. Raises ValueError."""
    try:
        fd = open_plain(directory / REGISTRY, most=MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{directory / REGISTRY}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & WRITABLE:
            raise ValueError(
                f"{directory / REGISTRY} belongs to uid {status.st_uid} and has mode {status.st_mode & 0o7777:04o}"
            )
        content = os.read(fd, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{directory / REGISTRY}: {error.strerror}") from error
    finally:
        os.close(fd)
    try:
        return decode(content)
    except ValueError as error:
        raise ValueError(f"{directory / REGISTRY}: {error}") from error


def write(directory: Path, beside: Beside) -> None:
    """Put the file into an image's directory; it survives a power failure.

    Raises NotKeptBeside; the old one is there then. Only one writer at a time may call this for a directory.
    """
    try:
        replace_file(directory / REGISTRY, encode(beside), durable=True, staging=REGISTRY_STAGING)
    except OSError as error:
        raise NotKeptBeside(
            f"{directory / REGISTRY} cannot be written: {error.strerror}", state="nothing was changed"
        ) from error


def newest(*known: Annotations) -> Annotations:
    """Return the annotations of the highest revision; the first of them where several have it."""
    return max(known, key=lambda one: one.revision, default=Annotations())


def stored(directory: Path, id: str) -> Beside:
    """Return what is kept with the image of that id, and an empty one for what cannot be used."""
    try:
        found = read(directory)
    except ValueError:
        found = None
    return found if found is not None and found.image == id else Beside(id)


def keep(directory: Path, id: str, annotations: Annotations) -> None:
    """Change the annotations kept with an image, and leave what is said of the replica. Raises NotKeptBeside."""
    write(directory, replace(stored(directory, id), annotations=annotations))


def _text(time: datetime | None) -> str:
    return "" if time is None else time.isoformat().replace("+00:00", "Z")


def _time(text: str) -> datetime | None:
    if not text:
        return None
    time = datetime.fromisoformat(text)
    if time.utcoffset() is None:
        raise ValueError(f"{text!r} is not a time of RFC 3339")
    return time.astimezone(UTC)
