"""Checkpoint images on disk for tests: real manifests with real digests, and small files instead of memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.manifest import (
    NAME,
    DataPath,
    File,
    GpuMemory,
    Host,
    ImageMount,
    ImageProcess,
    Manifest,
    Program,
    Source,
    UsedGpu,
)
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.checkpoint.image.store import write_manifest
from kybernate_shim.config import Config
from kybernate_shim.steps import Step
from kybernate_shim.trust.keys import Key, signing_key

SPEC: dict[str, Any] = {"process": {"args": ["count"]}, "root": {"path": "rootfs"}, "linux": {"cgroupsPath": "/d/c"}}


def save(
    directory: Path,
    *,
    spec: dict[str, Any] | None = SPEC,
    signed: bool = True,
    key: Key | None = None,
    digest: str = "blake2b",
    time: str = "2026-11-21T05:00:00.000Z",
    more: Mapping[str, bytes] = {},
    rootfs_diff: bool = True,
    **source: str,
) -> Manifest:
    """Write an image of container `counter` that only root can read, signed by `key` or the node's own."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700)
    contents = {"pages-1.img": bytes(range(256)) * 64, "core-1.img": b"registers", **more}
    if spec is not None:
        contents["kybernate-spec.json"] = json.dumps(spec).encode()
    files = []
    with Digester(digest, lambda count: None) as digester:
        for name, content in contents.items():
            (directory / name).write_bytes(content)
            (directory / name).chmod(0o600)
            files.append(File(name, len(content), digester.digest(directory / name)))
    manifest = Manifest(
        id="3f6b",
        time=time,
        source=Source(**{"container": "counter", "image": "busybox:1", "node": "here"} | source),
        runtime=Program("runc", "1.3.0"),
        criu=Program("criu", "4.2"),
        host=Host("6.18.0", "x86_64", ("avx2",), 2, 4096),
        rootfs_diff=rootfs_diff,
        processes=(ImageProcess(1, "count", 1 << 20), ImageProcess(7, "helper", 2 << 20)),
        cuda_processes=(GpuMemory(1, 1 << 30), GpuMemory(7, 0)),
        gpus=(UsedGpu("GPU-1", "NVIDIA H200", "580.1", (GpuMemory(1, 1 << 30),)),),
        visible_gpus=("GPU-0", "GPU-1"),
        data_path=DataPath("plain", "process 7 is traced"),
        mounts=(ImageMount("/proc", "proc", "pseudo"), ImageMount("/data", "ext4", "host", "/srv/data")),
        files=tuple(files),
        steps=(Step("dump", 1.5, 4096),),
    )
    if signed:
        manifest = sign(manifest, key or signing_key(Config.load()))
    write_manifest(directory, manifest, durable=False)
    (directory / NAME).chmod(0o600)
    return manifest
