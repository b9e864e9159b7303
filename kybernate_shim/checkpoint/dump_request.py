"""What a client wants of a checkpoint, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kybernate_shim.checkpoint.image.digests import DEFAULT as DEFAULT_DIGEST
from kybernate_shim.checkpoint.image.manifest import Manifest, TcpPolicy
from kybernate_shim.oci.options import CheckpointOptions


@dataclass(frozen=True)
class DumpRequest:
    """What a client wants. `image` is the directory for the image, `work` the one for logs and CRIU's scratch files.

    `durable`: the image survives a power failure once the call returns; a directory that containerd copies and removes
    immediately need not. `deadline` is in seconds for all steps together, 0 for none.
    `digest` is the algorithm for files. `max_freeze` is the time in seconds for which the container may be frozen, 0
    for what its annotation or the node says, a year for no limit; `max_freeze_from` says in words where it comes from.
    With a `destination`, `image` is a directory in memory, and the files go to the destination, `encrypted` or not.
    `hold` is how many seconds the container stays frozen when its image is complete, 0 for none.
    `volumes` are those of the pod's own that the image is to have, in the annotation's words; "" as configured.
    `rootfs_elsewhere`: the caller saves the changes of the root filesystem by itself, if they are saved.
    """

    image: Path
    work: Path
    exit: bool = False
    hold: float = 0
    tcp: TcpPolicy = "close"
    rootfs_diff: bool = False
    rootfs_elsewhere: bool = False
    volumes: str = ""
    durable: bool = True
    force: bool = False
    deadline: float = 0
    options: CheckpointOptions = field(default_factory=CheckpointOptions)
    source_image: str = ""
    source_digest: str = ""
    digest: str = DEFAULT_DIGEST
    max_freeze: float = 0
    max_freeze_from: str = ""
    destination: Path | None = None
    encrypted: bool = False

    @property
    def stays_frozen(self) -> bool:
        """Whether the container stays frozen until its image is complete on the disk."""
        return self.exit or self.hold > 0


@dataclass(frozen=True)
class Dumped:
    """A finished image. `digest` is the manifest's."""

    manifest: Manifest
    digest: str
