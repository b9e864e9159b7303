"""The manifest of a checkpoint image: what was dumped, where, by what, and every file that belongs to it.

`kybernate-manifest.json` is what a restore decides by before it touches anything. It holds facts only; what they mean
on another node is said in compat.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

from kybernate_shim.checkpoint.operation import Step
from kybernate_shim.checkpoint.record import FieldInvalid, from_json, to_json

NAME: Final = "kybernate-manifest.json"
VERSION: Final = 1

TcpPolicy = Literal["close", "established"]
StdioKind = Literal["null", "pipe", "file", "socket", "terminal", "other"]


class ManifestInvalid(Exception):
    """A manifest that cannot be believed. The message names the field and what is wrong with it."""


@dataclass(frozen=True)
class Source:
    """What was dumped. `container` is its id; `namespace`, `pod` and `name` are Kubernetes' words, empty elsewhere."""

    container: str
    namespace: str = ""
    pod: str = ""
    name: str = ""
    image: str = ""
    image_digest: str = ""
    node: str = ""


@dataclass(frozen=True)
class Program:
    """A program that took part, as its own --version says. `options` are the lines of its configuration."""

    name: str
    version: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """The machine: `kernel` is uname's release, `architecture` its machine, `cpu_features` flags of /proc/cpuinfo."""

    kernel: str
    architecture: str
    cpu_features: tuple[str, ...]
    cgroup_version: int
    page_size: int


@dataclass(frozen=True)
class Process:
    """One process, by its pid inside the container. `rss_bytes` is what it held in memory when it was dumped."""

    pid: int
    name: str
    rss_bytes: int


@dataclass(frozen=True)
class GpuMemory:
    """What one process, by its pid inside the container, held of GPU memory; `bytes` is 0 where nobody tells."""

    pid: int
    bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that the container used, and what each process held in its memory.

    Where the node does not tell who uses which, those that the container could use are listed, with no processes.
    """

    uuid: str
    model: str
    driver: str
    processes: tuple[GpuMemory, ...] = ()


@dataclass(frozen=True)
class VramFile:
    """A file with VRAM bytes, and the memory of a process that they belong into; pid as in the container.

    Addresses and sizes in bytes; what is zero may be a hole in the file, `data_bytes` is the rest. `digest` has the
    form of cuda.vram.digest: it is computed while the bytes are moved, and compared while they are moved back.
    """

    pid: int
    file: str
    start: int
    size: int
    data_bytes: int
    digest: str


@dataclass(frozen=True)
class ArenaBlock:
    """A piece of VRAM of a process: its number in the preload library's table, its address there, its bytes."""

    index: int
    address: int
    size: int


@dataclass(frozen=True)
class ArenaHole:
    """Bytes of an arena's file that are zeros, and need no room in the arena where they are restored."""

    offset: int
    size: int


@dataclass(frozen=True)
class ArenaFile:
    """A file with the bytes of all blocks, in order, that a process had in the node's arena; else as `VramFile`.

    They go into the arena of the node where the process is restored. `holes` are those that the arena knew of.
    """

    pid: int
    file: str
    size: int
    data_bytes: int
    digest: str
    blocks: tuple[ArenaBlock, ...]
    holes: tuple[ArenaHole, ...] = ()


@dataclass(frozen=True)
class DataPath:
    """How VRAM bytes came into the image: `fast` in files of their own, `plain` in CRIU's, and why."""

    name: Literal["fast", "plain"]
    why: str = ""


@dataclass(frozen=True)
class Mount:
    """A mount of the container. `kind` says where its content lives; only `pseudo` and `private` are in the image.

    `source` is the host's path; empty where there is none. Kinds: see mounts.py.
    """

    destination: str
    type: str
    kind: str
    source: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class File:
    """One file of the image. `digest` has the form of digests.py, or is the one of `vram` or `arena`."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about an image. `time` is RFC 3339 in UTC; `stdio` the kinds of descriptors 0, 1, 2.

    `cuda_processes` are all that held CUDA state, with their bytes on all GPUs together: none of them runs on before it
    is back on a GPU. `visible_gpus` are the UUIDs of all GPUs that the container could open, used or not, in the
    driver's order: a map to others names each of them.
    """

    id: str
    time: str
    source: Source
    runtime: Program
    criu: Program
    host: Host
    tcp: TcpPolicy = "close"
    stdio: tuple[StdioKind, ...] = ()
    terminal: bool = False
    rootfs_diff: bool = False
    processes: tuple[Process, ...] = ()
    cuda_processes: tuple[GpuMemory, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    visible_gpus: tuple[str, ...] = ()
    vram: tuple[VramFile, ...] = ()
    arena: tuple[ArenaFile, ...] = ()
    data_path: DataPath = field(default_factory=lambda: DataPath("plain", "no GPU state"))
    mounts: tuple[Mount, ...] = ()
    files: tuple[File, ...] = ()
    steps: tuple[Step, ...] = ()
    version: int = VERSION

    @property
    def has_gpu_state(self) -> bool:
        """Whether processes of the image wait for a GPU."""
        return bool(self.cuda_processes or self.gpus)

    @property
    def moved_files(self) -> tuple[VramFile | ArenaFile, ...]:
        """The files that are digested while their bytes are moved, out or back."""
        return (*self.vram, *self.arena)

    @property
    def arena_bytes(self) -> int:
        """What a restore needs of the node's arena."""
        return sum(file.size - sum(hole.size for hole in file.holes) for file in self.arena)

    @property
    def bytes(self) -> int:
        """Payload of all files."""
        return sum(file.size for file in self.files)


def now() -> str:
    """Return the time in the form of `Manifest.time`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as it is stored: JSON that a person can read."""
    return (json.dumps(to_json(manifest), indent=1, ensure_ascii=False) + "\n").encode(errors="surrogateescape")


def decode(content: bytes) -> Manifest:
    """Return the manifest that `encode` wrote. Raises ManifestInvalid."""
    try:
        document = json.loads(content.decode(errors="surrogateescape"))
    except ValueError as error:
        raise ManifestInvalid(f"not JSON: {error}") from error
    # The version comes first: to complain of a field of another format's version would lead astray.
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ManifestInvalid(f"version: {version} is not understood, only {VERSION} is; use the release that wrote it")
    try:
        manifest = from_json(Manifest, document)
        _check(manifest)
    except FieldInvalid as error:
        raise ManifestInvalid(str(error)) from error
    return manifest


def _check(manifest: Manifest) -> None:
    if not manifest.id:
        raise FieldInvalid("id", "empty")
    _check_time(manifest.time)
    seen = set()
    for index, file in enumerate(manifest.files):
        place = f"files[{index}].name"
        if not is_flat(file.name) or file.name == NAME:
            raise FieldInvalid(place, f"{file.name!r} is not the name of a file beside the manifest")
        if file.name in seen:
            raise FieldInvalid(place, f"{file.name!r} is there twice")
        seen.add(file.name)
    for index, vram in enumerate(manifest.vram):
        if vram.file not in seen:
            raise FieldInvalid(f"vram[{index}].file", f"{vram.file!r} is not among the files")
    for index, arena in enumerate(manifest.arena):
        if arena.file not in seen:
            raise FieldInvalid(f"arena[{index}].file", f"{arena.file!r} is not among the files")


def _check_time(text: str) -> None:
    try:
        offset = datetime.fromisoformat(text).utcoffset()
    except ValueError:
        offset = None
    if offset is None or "T" not in text:
        raise FieldInvalid("time", f"{text!r} is not a time of RFC 3339")


def is_flat(name: str) -> bool:
    """Tell whether `name` is a plain file name, the only kind that survives containerd's flat unpacking."""
    return bool(name) and "/" not in name and "\0" not in name and ".." not in name and name != "."
