"""What a checkpoint and a restore need of a container, and of the object that handles its accelerator."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from kybernate_shim.checkpoint.compat import Difference
from kybernate_shim.checkpoint.image.manifest import (
    DataPath,
    GpuMemory,
    Manifest,
    Released,
    UsedGpu,
)
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import Config
from kybernate_shim.errors import Failed
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.linux.children import Children
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.oci.spec import Spec
from kybernate_shim.vram_io.image_files import ArenaFile, VramFile


class Target(Protocol):
    """A container. `cgroup` is None before its first process exists and after the last has ended.

    `came_from` is the image that it was restored from, None where it was started.
    """

    id: str
    namespace: str
    bundle: Bundle
    spec: Spec
    options: RuntimeOptions
    config: Config
    runtime: Runtime
    children: Children
    cgroup: Cgroup | None

    @property
    def init_pid(self) -> int: ...

    @property
    def came_from(self) -> Manifest | None: ...


class NotBack(Failed):
    """Processes could not be brought back to their GPUs. The message says which and what can be done."""


class Detached(Protocol):
    """What has left its GPUs. Set `gone` where the processes have ended, so that none is brought back."""

    gone: bool

    @property
    def cuda_processes(self) -> tuple[GpuMemory, ...]: ...

    @property
    def gpus(self) -> tuple[UsedGpu, ...]: ...

    @property
    def vram(self) -> tuple[VramFile, ...]: ...

    @property
    def driven_bytes(self) -> int: ...

    @property
    def arena(self) -> tuple[ArenaFile, ...]: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def data_path(self) -> DataPath: ...

    def moved_out(self, image: Path, operation: Operation) -> AbstractAsyncContextManager[None]:
        """Keep VRAM bytes in files of `image` while the context lasts, so that a dump finds small processes.

        They must run, not be frozen, at both ends. Raises a VramError with the container as it was.
        """

    async def complete(self) -> None:
        """Return when all VRAM bytes are in the image. Raises a VramError."""

    async def release(self, operation: Operation) -> None:
        """Have forked processes give up what they have inherited of GPU devices; they must run. Raises Refused."""

    async def must_release(self) -> bool:
        """Return whether one of the processes, which are frozen, still holds something that CRIU cannot dump."""

    @property
    def released(self) -> tuple[Released, ...]: ...

    @property
    def visible_gpus(self) -> tuple[str, ...]: ...


class Accelerator(Protocol):
    """Takes a container's processes off their GPUs and puts them back."""

    def detached(
        self, operation: Operation, image: Path, *, force: bool, strong: bool = False
    ) -> AbstractAsyncContextManager[Detached]:
        """Keep the processes off their GPUs while the context lasts; they must run, not be frozen, at both ends.

        Some of their bytes may be in files of `image` then; `strong`: with digests that find forgery.

        Raises, with the container as it was, what would lose their state; `force` overrides mere suspicions.
        """

    async def compare(self, manifest: Manifest) -> list[Difference]:
        """Return what speaks against restoring the image here."""

    async def attach(self, image: Image, operation: Operation) -> None:
        """Bring restored processes onto GPUs. Raises with the processes still off, to be killed."""
