"""A pretended machine with two GPUs, its CUDA helper, and programs that compute on it, fresh for every test."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim import native
from kybernate_shim.address import answers
from kybernate_shim.arena.memory import Memory
from kybernate_shim.cuda_worker import kernel
from kybernate_shim.gpu.helper_client import CudaHelper, cuda_helper, start_helper
from kybernate_shim.linux.mount.rootfs import unmount_tree
from kybernate_shim.native import PRELOAD
from kybernate_shim.native import build as build_native
from tests.contract.cuda_driver.helper_processes import helpers, kill_helpers
from tests.fakes.cuda import GIB, Gpus, build
from tests.fakes.cuda.programs import Holder, Program

ARENA_BYTES = 64 << 20
CAPABILITY = 9, 0  # of a pretended GPU
Use = Callable[[CudaHelper], Awaitable[Any]]


@pytest.fixture(scope="session")
def libraries() -> Path:
    return build()


@pytest.fixture
def gpus(tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """A machine with two GPUs of 1 GiB; helpers that are started from here on use it."""
    machine = Gpus.create(tmp_path / "machine", size=GIB)
    for name, value in machine.environment(libraries).items():
        monkeypatch.setenv(name, value)
    return machine


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Where this test's helper listens; every helper that was started on it is gone afterwards."""
    path = tmp_path / "run" / "cuda.sock"
    yield path
    kill_helpers(path)


@pytest.fixture
def use(gpus: Gpus, socket: Path) -> Callable[[Use], Any]:
    """Run a coroutine function with a CudaHelper of this test's machine and return its result."""

    def run(body: Use) -> Any:
        async def main() -> Any:
            async with cuda_helper(socket) as helper:
                return await body(helper)

        return asyncio.run(main())

    return run


@pytest.fixture
def start(gpus: Gpus, libraries: Path) -> Iterator[Callable[..., Program]]:
    """Start a Program; all of them are killed afterwards."""
    started: list[Program] = []

    def begin(**options: Any) -> Program:
        program = Program.start(gpus, libraries, **options)
        started.append(program)
        return program

    yield begin
    for program in started:
        program.kill()


@pytest.fixture(scope="session")
def preload(libraries: Path) -> Path:
    return build_native(PRELOAD, libraries)


@pytest.fixture
def start_holder(gpus: Gpus, libraries: Path, preload: Path) -> Iterator[Callable[..., Holder]]:
    """Start a Holder with the arena's library, each piece with another value; all of them are killed afterwards."""
    started: list[Holder] = []

    def begin(pieces: int, *, zeros: bool = False, library: Path = preload, **options: Any) -> Holder:
        holder = Holder(gpus, libraries, pieces, library, **options)
        started.append(holder)
        for piece in range(0 if zeros else pieces):
            holder.fill(piece, piece + 1)
        return holder

    yield begin
    for holder in started:
        holder.kill()


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Build a preload library that does not know a verb of the control page."""

    def build_older(verb: str) -> Path:
        package = tmp_path / "package"
        shutil.copytree(PRELOAD.of().parent, package / PRELOAD.folder)
        source = package / PRELOAD.folder / "answer.c"
        text = source.read_text()
        source.write_text(text.replace(f"case {verb}:", "case -1U:"))
        assert source.read_text() != text
        with monkeypatch.context() as patched:
            patched.setattr(native, "PACKAGE", package)
            return build_native(PRELOAD, tmp_path / "old")

    return build_older


@pytest.fixture
def arena_bytes() -> int:
    """The size of the arena that `use_arena` makes."""
    return ARENA_BYTES


@pytest.fixture
def memory(arena_bytes: int, tmp_path: Path) -> Memory:
    """The arena that `use_arena` makes."""
    return Memory(arena_bytes, tmp_path / "arena")


@pytest.fixture
def machine_code(memory: Memory) -> Path:
    """What a GPU needs to hash is there already; a pretended GPU takes anything for it."""
    memory.prepare()
    path = kernel.cached(memory.file.parent, *CAPABILITY)
    path.write_bytes(b"machine code")
    return path


@pytest.fixture
def use_arena(
    gpus: Gpus, machine_code: Path, arena_bytes: int, tmp_path: Path, socket: Path
) -> Iterator[Callable[[Use], Any]]:
    """Run a coroutine function with a helper that has an arena."""
    folder = tmp_path / "arena"
    options = ["--arena", str(arena_bytes), "--arena-folder", str(folder)]

    def run(body: Use) -> Any:
        async def main() -> Any:
            if not helpers(socket):
                start_helper(socket, options=options)
                while not answers(socket):  # noqa: ASYNC110  # of another process
                    await asyncio.sleep(0.01)
            async with cuda_helper(socket, start=False) as helper:
                return await body(helper)

        return asyncio.run(main())

    yield run
    kill_helpers(socket)
    if folder.is_mount():
        unmount_tree(folder)
