"""What a checkpoint and a restore need of a container, and of whoever takes care of its accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kybernate_shim.checkpoint.manifest import Gpu
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import Config
from kybernate_shim.linux.cgroups import Cgroup
from kybernate_shim.linux.children import Children
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.oci.spec import Spec


class Target(Protocol):
    """A container. `cgroup` is None before its first process exists and after the last has ended."""

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


class Accelerator(Protocol):
    """Takes a container's processes off their GPUs and puts them back."""

    async def refuse_if_lost(self, pids: Sequence[int], *, force: bool) -> None:
        """Raise when a checkpoint would be accepted by the driver and could not be restored."""

    def detached(self, pids: Sequence[int], operation: Operation) -> AbstractAsyncContextManager[tuple[Gpu, ...]]:
        """Keep the processes off their GPUs while the context lasts; they must run, not be frozen, at both ends."""

    async def attach(self, pids: Sequence[int], gpus: Sequence[Gpu], operation: Operation) -> None:
        """Bring restored processes back onto GPUs. Raises with the processes still off, to be killed."""
