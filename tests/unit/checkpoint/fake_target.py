"""A container to checkpoint and to restore: its freezer is a flag, its programs follow a script, steps are noted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from kybernate_shim.checkpoint.compat import Difference
from kybernate_shim.checkpoint.image.manifest import NAME, DataPath, GpuMemory, Manifest, Released, UsedGpu
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.config import Config
from kybernate_shim.linux.children import Finished
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.oci.spec import Spec
from kybernate_shim.vram_io.image_files import ArenaFile, VramFile

NOBODY = 1 << 30  # beyond every pid that the kernel gives
LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])

Act = Callable[[Sequence[str]], Awaitable[int] | int]


@dataclass
class FakeCgroup:
    """Notes what is done to it, and whether the image was complete by then."""

    steps: list[str]
    image: Path
    frozen: bool = False
    exists: bool = True
    version: int = 2
    on_freeze: Callable[[], None] = lambda: None

    def processes(self) -> list[int]:
        return [NOBODY] if self.exists else []

    def freeze(self) -> None:
        self.on_freeze()
        self.frozen = True
        self.steps.append("freeze")

    def thaw(self) -> None:
        self.frozen = False
        self.steps.append("thaw")

    def kill(self) -> None:
        self.exists = False
        self.steps.append("kill with an image" if (self.image / NAME).exists() else "kill without an image")


@dataclass
class FakeRunner:
    """Runs nothing: says versions, and lets `on` decide the status of the runtime's verbs."""

    steps: list[str]
    on: dict[str, Act] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # of the last program

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        fds: Mapping[int, int] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        cwd: Path | None = None,
        umask: int | None = None,
    ) -> Finished:
        if argv[-1] == "--version":
            return Finished(tuple(argv), 0, "Version: 4.2\nrunc version 1.3.0", "")
        self.environment = env or {}
        verb = next(word for word in argv if word in ("checkpoint", "restore", "delete"))
        self.steps.append(verb if "--leave-running" in argv or verb != "checkpoint" else "checkpoint that ends it")
        status = self.on.get(verb, lambda argv: 0)(argv)
        return Finished(tuple(argv), status if isinstance(status, int) else await status, "", "")


@dataclass
class FakeDetached:
    cuda_processes: tuple[GpuMemory, ...] = ()
    gpus: tuple[UsedGpu, ...] = ()
    visible_gpus: tuple[str, ...] = ()
    vram: tuple[VramFile, ...] = ()
    arena: tuple[ArenaFile, ...] = ()
    arena_bytes: int = 0
    released: tuple[Released, ...] = ()
    appearing: int = 0  # how often a frozen container turns out to have another child that must release something
    driven_bytes: int = 0
    data_path: DataPath = field(default_factory=lambda: DataPath("plain"))
    gone: bool = False
    steps: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def moved_out(self, image: Path, operation: Operation) -> AsyncIterator[None]:
        self.steps.append("bytes out")
        try:
            yield
        finally:
            if not self.gone:
                self.steps.append("bytes back")

    async def complete(self) -> None:
        self.steps.append("bytes complete")

    async def release(self, operation: Operation) -> None:
        self.steps.append("release")

    async def must_release(self) -> bool:
        self.appearing -= 1
        return self.appearing >= 0


@dataclass
class FakeAccelerator:
    """Notes when processes leave their GPUs and come back."""

    steps: list[str]
    findings: list[Difference] = field(default_factory=list)
    appearing: int = 0

    @asynccontextmanager
    async def detached(
        self, operation: Operation, image: Path, *, force: bool, strong: bool = False
    ) -> AsyncIterator[FakeDetached]:
        self.steps.append("detach")
        left = FakeDetached(steps=self.steps, appearing=self.appearing)
        try:
            yield left
        finally:
            self.steps.append("forget" if left.gone else "attach")

    async def compare(self, manifest: Manifest) -> list[Difference]:
        return self.findings

    async def attach(self, image: Image, operation: Operation) -> None:
        self.steps.append("attach")


class FakeTarget:
    """`steps` is what happened to it, in order."""

    id = "c"
    namespace = "default"
    options = RuntimeOptions()
    init_pid = os.getpid()
    came_from: Manifest | None = None

    def __init__(self, directory: Path, document: Mapping[str, Any] | None = None, **config: Any) -> None:
        self.steps: list[str] = []
        self.image = directory / "image"
        self.work = directory / "work"
        self.bundle = Bundle(directory / "bundle")
        self.bundle.rootfs.mkdir(parents=True)
        self.spec = Spec(document or {})
        self.config = Config(**{"criu": Path("/nowhere/criu"), "key_directory": directory / "keys", **config})
        self.cgroup = FakeCgroup(self.steps, self.image)
        self.children = FakeRunner(self.steps)
        self.runtime = Runtime(Cli(Path("/nowhere/runc"), directory / "state", None), self.children, {})
