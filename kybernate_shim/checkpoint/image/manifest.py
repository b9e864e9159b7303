"""The manifest of a checkpoint image: what was dumped, where, by what, and every file that belongs to it.

`kybernate-manifest.json` is what a restore decides by before it touches anything. It holds facts only; what they mean
on another node is said in compat.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Literal

from kybernate_shim.checkpoint.image.codec import field_invalid, from_json, parse, to_json
from kybernate_shim.linux.addresses import packed_address
from kybernate_shim.linux.socket_settings import SocketSettings
from kybernate_shim.linux.thread_settings import ThreadSettings, cpu_set
from kybernate_shim.steps import Step
from kybernate_shim.trust.credentials import Security
from kybernate_shim.vram_io.image_files import ARRIVAL, MOST_PIECES, ArenaFile, VramFile

NAME: Final = "kybernate-manifest.json"
REGISTRY: Final = "kybernate-registry.json"  # what the node's registry keeps with an image; no part of the image
REGISTRY_STAGING: Final = f".{REGISTRY}.tmp"  # it may stay after a kill
ARRIVING: Final = "kybernate-arriving.json"  # the manifest as long as files of VRAM arrive: nothing takes it for one
STAGING: Final = f".{NAME}.tmp"  # of the manifest and of ARRIVING: there while an image that arrives is looked at
NOT_PAYLOAD: Final = frozenset({NAME, REGISTRY, REGISTRY_STAGING, STAGING, ARRIVING, ARRIVAL})
SAVED_SPEC: Final = "kybernate-spec.json"  # config.json as containerd wrote it: a restore without a pod starts from it
VERSION: Final = 1
LEFT_OUT_IF_EMPTY: Final = ("released", "threads", "sockets", "volumes", "addresses", "frozen_ms")
MOST_BYTES: Final = 32 << 20  # of a manifest; one that lists 100,000 files has 15 MiB
LONGEST_NAME: Final = 255  # bytes of a file's name, as Linux has it
END_OF_MEMORY: Final = 1 << 64

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
class Lineage:
    """Where the container of an image comes from, over its restores. Empty for one without a pod that was started.

    `origin` is the id of the first container, where that is another one; `parent` the id of the image that this one
    was restored from; `pod_uid` that of the pod which it was in.
    """

    origin: str = ""
    parent: str = ""
    pod_uid: str = ""


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
class ImageProcess:
    """One process, by its pid inside the container. `rss_bytes` is what it held in memory when it was dumped."""

    pid: int
    name: str
    rss_bytes: int


@dataclass(frozen=True)
class GpuMemory:
    """What one process, by its pid inside the container, held of GPU memory; `bytes` is 0 where it is unknown."""

    pid: int
    bytes: int


@dataclass(frozen=True)
class UsedGpu:
    """A GPU that the container used, and what each process held in its memory.

    Where the node does not report which process uses which GPU, those that the container could use are listed,
    with no processes.
    """

    uuid: str
    model: str
    driver: str
    processes: tuple[GpuMemory, ...] = ()


@dataclass(frozen=True)
class Released:
    """What a process without CUDA state, by its pid inside the container, gave up before it was dumped.

    Those are mappings and descriptors of GPU devices that it had inherited by a fork and could not use. Of the `bytes`
    mapped, `kept_bytes` were host memory, and are private memory of the process since.
    """

    pid: int
    name: str
    mappings: int
    bytes: int
    kept_bytes: int
    descriptors: int


@dataclass(frozen=True)
class DataPath:
    """How VRAM bytes came into the image: `fast` in files of their own, `plain` in CRIU's, and why."""

    name: Literal["fast", "plain"]
    why: str = ""


@dataclass(frozen=True)
class ImageMount:
    """A mount of the container. `kind` says where its content lives; only `pseudo` and `private` are in the image.

    `source` is the host's path; empty where there is none. Kinds: see mounts/described.py. `declared` is the
    destination of a bind mount as config.json has it, where it led through links to another place.
    """

    destination: str
    type: str
    kind: str
    source: str = ""
    options: tuple[str, ...] = ()
    declared: str = ""


@dataclass(frozen=True)
class ImageVolume:
    """A volume that lives and dies with its pod, whose content is in `file`: an emptyDir, or the pod's /dev/shm.

    `name` is that of the volume in the pod, `dev-shm` for /dev/shm; `destinations` are where the container had it.
    `entries` are files of all kinds, `bytes` those of their content, holes aside. `id` is what the volume itself was
    marked with, "" where its filesystem has no attributes.
    """

    file: str
    name: str
    kind: Literal["empty-dir", "shm"]
    destinations: tuple[str, ...]
    entries: int
    bytes: int
    id: str = ""


@dataclass(frozen=True)
class File:
    """One file of the image. `digest` has the form of digests.py, or is the one of `vram` or `arena`.

    In an encrypted image both are of the file before encryption, and `stored` is its size on the disk.
    """

    name: str
    size: int
    digest: str
    stored: int = 0


@dataclass(frozen=True)
class Encryption:
    """How all files of an image are encrypted; on the disk, their names end with `.enc`. See trust/encryption.py.

    `wrapped_key` is the image's data key, encrypted with the node's key `key_id`.
    """

    key_id: str
    wrapped_key: str
    chunk_bytes: int
    algorithm: Literal["AES-256-GCM"] = "AES-256-GCM"


@dataclass(frozen=True)
class Signature:
    """Which key vouches for the manifest, and so for the image: an HMAC-SHA-256 in hexadecimal by the key named `key`.

    It covers the bytes of the whole manifest with 64 zeros in the place of `value`. Both are empty where none signed.
    """

    key: str = ""
    value: str = ""


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about an image. `time` is RFC 3339 in UTC; `stdio` the kinds of descriptors 0, 1, 2.

    `cuda_processes` are all that held CUDA state, with their bytes on all GPUs together: none of them continues before
    it is back on a GPU. `visible_gpus` are the UUIDs of all GPUs that the container could open, used or not, in the
    driver's order: a map to others names each of them. `addresses` are the pod's. `frozen_ms` is how long the
    container was frozen: until it ran again, or until the image was complete. It, `released`, `threads`, which are
    those that have chosen something that CRIU does not keep, `sockets`, the same of them, `volumes`, `lineage`,
    `addresses`, `declared` of a mount, and `id` of a volume are left out where they are empty, so that older releases
    read the manifest. `security` is empty in images of older releases.
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
    processes: tuple[ImageProcess, ...] = ()
    cuda_processes: tuple[GpuMemory, ...] = ()
    gpus: tuple[UsedGpu, ...] = ()
    visible_gpus: tuple[str, ...] = ()
    vram: tuple[VramFile, ...] = ()
    arena: tuple[ArenaFile, ...] = ()
    data_path: DataPath = field(default_factory=lambda: DataPath("plain", "no GPU state"))
    released: tuple[Released, ...] = ()
    threads: tuple[ThreadSettings, ...] = ()
    sockets: tuple[SocketSettings, ...] = ()
    mounts: tuple[ImageMount, ...] = ()
    volumes: tuple[ImageVolume, ...] = ()
    lineage: Lineage = Lineage()
    addresses: tuple[str, ...] = ()
    security: Security = field(default_factory=Security)
    files: tuple[File, ...] = field(default=(), metadata={"most": MOST_PIECES})
    encryption: Encryption | None = None
    frozen_ms: int = 0
    steps: tuple[Step, ...] = ()
    signature: Signature = Signature()
    version: int = VERSION

    @property
    def origin(self) -> str:
        """The id of the container that all images of the lineage come from."""
        return self.lineage.origin or self.source.container

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
    def stored_files(self) -> tuple[File, ...]:
        """The files by their names and sizes on the disk."""
        if self.encryption is None:
            return self.files
        return tuple(replace(file, name=f"{file.name}.enc", size=file.stored) for file in self.files)

    @property
    def bytes(self) -> int:
        """Payload of all files."""
        return sum(file.size for file in self.files)


def now() -> str:
    """Return the time in the form of `Manifest.time`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as it is stored: JSON that a person can read."""
    document = to_json(manifest)
    for name in LEFT_OUT_IF_EMPTY:
        if not document[name]:
            del document[name]
    if manifest.lineage == Lineage():
        del document["lineage"]
    for mount in document["mounts"]:
        if not mount["declared"]:
            del mount["declared"]
    for volume in document.get("volumes", ()):
        if not volume["id"]:
            del volume["id"]
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(errors="surrogateescape")


def decode(content: bytes) -> Manifest:
    """Return the manifest that `encode` wrote. Raises ManifestInvalid.

    `content` may come from anywhere; what time and memory this takes is bounded by MOST_BYTES.
    """
    if len(content) > MOST_BYTES:
        raise ManifestInvalid(f"{len(content)} bytes, at most {MOST_BYTES} are accepted")
    try:
        document = parse(content)
    except ValueError as error:
        raise ManifestInvalid(f"not JSON: {error}") from error
    # The version comes first: to complain of a field of another format's version would lead astray.
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != VERSION:
        shown = version if abs(version) < END_OF_MEMORY else "a huge number"
        raise ManifestInvalid(f"version: {shown} is not supported, only {VERSION} is; use the release that wrote it")
    try:
        manifest = from_json(Manifest, document)
        _check(manifest)
    except ValueError as error:
        raise ManifestInvalid(str(error)) from error
    return manifest


def _check(manifest: Manifest) -> None:
    if not manifest.id:
        raise field_invalid("id", "empty")
    _check_time(manifest.time)
    seen = set()
    for index, file in enumerate(manifest.files):
        place = f"files[{index}].name"
        if not is_flat(file.name) or file.name in NOT_PAYLOAD:
            raise field_invalid(place, f"{file.name!r} is not the name of a file in the manifest's directory")
        if file.name in seen:
            raise field_invalid(place, f"{file.name!r} is listed twice")
        seen.add(file.name)
    for index, volume in enumerate(manifest.volumes):
        if volume.file not in seen or not volume.destinations:
            raise field_invalid(f"volumes[{index}]", f"{volume.file!r} is not among the files, or has no destination")
    _check_moved(manifest)
    for index, address in enumerate(manifest.addresses):
        try:
            packed_address(address)
        except ValueError as error:
            raise field_invalid(f"addresses[{index}]", str(error)) from error
    for index, thread in enumerate(manifest.threads):
        try:
            cpu_set(thread.cpus)
        except ValueError as error:
            raise field_invalid(f"threads[{index}].cpus", str(error)) from error
    for index, one in enumerate(manifest.sockets):
        try:
            one.check()
        except ValueError as error:
            raise field_invalid(f"sockets[{index}]", str(error)) from error


def _check_moved(manifest: Manifest) -> None:
    """Check the files of VRAM bytes against the list of files, and that they are for different memory."""
    files = {file.name: file for file in manifest.files}
    regions: dict[int, list[tuple[int, int, str]]] = {}
    used: set[str] = set()
    vram: list[tuple[str, VramFile | ArenaFile]] = [(f"vram[{i}]", file) for i, file in enumerate(manifest.vram)]
    arena: list[tuple[str, VramFile | ArenaFile]] = [(f"arena[{i}]", file) for i, file in enumerate(manifest.arena)]
    for place, file in (*vram, *arena):
        listed = files.get(file.file)
        if listed is None:
            raise field_invalid(f"{place}.file", f"{file.file!r} is not among the files")
        if file.file in used:
            raise field_invalid(f"{place}.file", f"{file.file!r} is listed twice")
        used.add(file.file)
        if (listed.size, listed.digest) != (file.size, file.digest):
            raise field_invalid(place, f"size or digest differ from those of {file.file!r} among the files")
        if file.data_bytes > file.size:
            raise field_invalid(f"{place}.data_bytes", f"{file.data_bytes} of {file.size} bytes")
        if isinstance(file, ArenaFile):
            _check_arena(file, place)
        else:
            regions.setdefault(file.pid, []).append((file.start, file.size, place))
    for listed_regions in regions.values():
        _check_apart(listed_regions, END_OF_MEMORY)


def _check_arena(file: ArenaFile, place: str) -> None:
    blocks = [(block.address, block.size, f"{place}.blocks[{index}]") for index, block in enumerate(file.blocks)]
    _check_apart(blocks, END_OF_MEMORY)
    if len({block.index for block in file.blocks}) != len(file.blocks):
        raise field_invalid(f"{place}.blocks", "an index is listed twice")
    if sum(size for _, size, _ in blocks) != file.size:
        raise field_invalid(f"{place}.blocks", f"they are not the {file.size} bytes of the file")
    holes = [(hole.offset, hole.size, f"{place}.holes[{index}]") for index, hole in enumerate(file.holes)]
    _check_apart(holes, file.size)


def _check_apart(ranges: list[tuple[int, int, str]], end: int) -> None:
    """Refuse ranges (start, size, place) that overlap each other or reach beyond `end`."""
    done = 0
    for start, size, place in sorted(ranges):
        if start < done:
            raise field_invalid(place, f"{size} bytes at {start:#x} overlap others")
        done = start + size
        if done > end:
            raise field_invalid(place, f"{size} bytes at {start:#x} reach beyond {end:#x}")


def _check_time(text: str) -> None:
    try:
        offset = datetime.fromisoformat(text).utcoffset()
    except ValueError:
        offset = None
    if offset is None or "T" not in text:
        raise field_invalid("time", f"{text!r} is not a time of RFC 3339")


def is_flat(name: str) -> bool:
    """Return whether `name` is a plain file name, the only kind that survives containerd's flat unpacking."""
    if not name or "/" in name or ".." in name or name == "." or any(mark < " " or mark == "\x7f" for mark in name):
        return False
    return len(name.encode(errors="surrogateescape")) <= LONGEST_NAME
