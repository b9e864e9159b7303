"""Small checkpoint images for tests of many: real signed manifests with real digests, and a few bytes of memory."""

from __future__ import annotations

import os
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

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
    encode,
)
from kybernate_shim.checkpoint.image.signature import sign
from kybernate_shim.linux.private_files import write_private
from kybernate_shim.trust.keys import Key

CONTENTS = {"core-1.img": b"registers", "pages-1.img": bytes(range(256))}
FILES = tuple(File(name, len(data), f"blake2b:{blake2b(data).hexdigest()}") for name, data in CONTENTS.items())
PATTERN = Manifest(
    id="-",
    time="2026-11-21T05:00:00.000Z",
    source=Source("-"),
    runtime=Program("runc", "1.3.0"),
    criu=Program("criu", "4.2", ("tcp-close", "manage-cgroups ignore")),
    host=Host("6.18.0", "x86_64", tuple(f"feature{number}" for number in range(60)), 2, 4096),
    processes=tuple(ImageProcess(pid, f"worker-{pid}", 64 << 20) for pid in range(1, 9)),
    cuda_processes=(GpuMemory(1, 16 << 30),),
    gpus=(UsedGpu("GPU-1", "NVIDIA H200", "580.1", (GpuMemory(1, 16 << 30),)),),
    visible_gpus=("GPU-1",),
    data_path=DataPath("fast"),
    mounts=tuple(ImageMount(f"/mount/{number}", "proc", "pseudo") for number in range(20)),
    files=FILES,
)


def write_image(directory: Path, key: Key, *, id: str, time: str = PATTERN.time, **source: str) -> Manifest:
    """Write an image that `key` has signed into a new directory; only its owner can read it."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700)
    for name, data in CONTENTS.items():
        write_private(directory / name, data)
    origin = Source(**{"container": f"c-{id}", "image": "registry.local/app:1", "node": os.uname().nodename} | source)
    manifest = sign(replace(PATTERN, id=id, time=time, source=origin), key)
    write_private(directory / NAME, encode(manifest))
    return manifest
