"""The manifest of a dump, and the files of ours that belong to its image."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate_shim.checkpoint.criu import credentials, images
from kybernate_shim.checkpoint.criu.claim import without_claim
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import (
    SAVED_SPEC,
    DataPath,
    File,
    ImageProcess,
    ImageVolume,
    StdioKind,
)
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import payload_names, write_manifest
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.target import Detached, Target
from kybernate_shim.linux.plain_files import read_plain
from kybernate_shim.linux.private_files import copy_private, write_private
from kybernate_shim.linux.socket_settings import SocketSettings
from kybernate_shim.linux.thread_settings import ThreadSettings
from kybernate_shim.trust.credentials import security_of
from kybernate_shim.vram_io.image_files import ArenaFile, VramFile

if TYPE_CHECKING:
    from kybernate_shim.checkpoint.image.encrypted import Sealed  # few nodes encrypt
from kybernate_shim.checkpoint.dump_plan import DumpPlan
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest

LOG = "dump.log"  # CRIU's, in the work directory
STATISTICS = "stats-dump"
MOST_DESCRIPTORS = 1 << 20  # bytes of descriptors.json


@dataclass(frozen=True)
class Chosen:
    """What programs have chosen for their threads and sockets, and CRIU does not keep."""

    threads: tuple[ThreadSettings, ...] = ()
    sockets: tuple[SocketSettings, ...] = ()


def add_own_files(target: Target, request: DumpRequest) -> None:
    """Add the logs that belong to the image, and what its container was."""
    for name in (LOG, STATISTICS):
        if (request.work / name).exists() and not (request.image / name).exists():
            copy_private(request.work / name, request.image / name)
    spec = without_claim(target.spec.document)
    write_private(request.image / SAVED_SPEC, json.dumps(spec, separators=(",", ":"), ensure_ascii=False))


def finish(
    request: DumpRequest,
    operation: Operation,
    plan: DumpPlan,
    volumes: tuple[ImageVolume, ...],
    chosen: Chosen,
    detached: Detached | None,
    digester: Digester,
    sealed: Sealed | None,
    frozen_ms: int,
) -> Dumped:
    """Write the manifest, which makes the files an image; they are in its directory, or encrypted where `sealed`.

    `frozen_ms` is how long the container was frozen, or has been by now where it still is.
    """
    processes = images.processes(request.image)
    there = {process.pid for process in processes}  # one that has ended since it was locked waits for no GPU
    manifest = replace(
        plan.manifest,
        stdio=_stdio_kinds(request.image / "descriptors.json"),
        processes=tuple(ImageProcess(process.pid, process.name, process.rss_bytes) for process in processes),
        cuda_processes=tuple(one for one in detached.cuda_processes if one.pid in there) if detached else (),
        gpus=detached.gpus if detached else (),
        visible_gpus=detached.visible_gpus if detached else (),
        released=tuple(one for one in detached.released if one.pid in there) if detached else (),
        vram=detached.vram if detached else (),
        arena=detached.arena if detached else (),
        threads=chosen.threads,
        sockets=chosen.sockets,
        volumes=volumes,
        data_path=detached.data_path if detached else DataPath("plain", "no GPU state"),
        security=security_of(plan.spec, credentials.credentials(request.image)),
        files=_files(request.image, (*detached.vram, *detached.arena) if detached else (), digester),
        frozen_ms=frozen_ms,
        steps=tuple(step for step in operation.steps if step.seconds),
    )
    if sealed is not None:
        manifest = sealed.manifest(manifest)
    manifest = sign(manifest, plan.key)
    return Dumped(manifest, write_manifest(request.destination or request.image, manifest, durable=request.durable))


def _files(image: Path, moved: Sequence[VramFile | ArenaFile], digester: Digester) -> tuple[File, ...]:
    """Return all files of the image; those with VRAM bytes were digested when they were written."""
    done = {file.file: File(file.file, file.size, file.digest) for file in moved}
    rest = digester.files(image, [name for name in payload_names(image) if name not in done])
    return tuple(sorted([*done.values(), *rest], key=lambda file: file.name))


def _stdio_kinds(descriptors: Path) -> tuple[StdioKind, ...]:
    """Return what 0, 1 and 2 were, by the names that the runtime has recorded."""
    try:
        names = json.loads(read_plain(descriptors, most=MOST_DESCRIPTORS))
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(map(_stdio_kind, names))


def _stdio_kind(name: str) -> StdioKind:
    if name.startswith("pipe:"):
        return "pipe"
    if name.startswith("socket:"):
        return "socket"
    if name == os.devnull:
        return "null"
    return "terminal" if name.startswith("/dev/pts") else "file" if name.startswith("/") else "other"
