"""The shim's settings: `/etc/kybernate/shim.toml`, and what the runtime options from containerd change in it.

Every setting is one line of a dataclass here, with its default, its form, its unit, who may change it and what it is
for; the manual's table is made from the same lines. A new table is a new dataclass and one line in `Config`.
"""

# ruff: noqa: RUF009  (settings are dataclass fields; their declarations only call dataclasses.field)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

from kybernate_shim.config.declaring import CONTAINER, OPTIONS, POD, SERVER, setting, table
from kybernate_shim.config.forms import (
    BYTES,
    CRIU,
    DIRECTORIES,
    DIRECTORY,
    HOLD,
    LEVEL,
    NODE_SIZES,
    OPTIONAL_PATH,
    SECONDS,
    SHARE,
    SIZES,
    SWITCH,
    TEXT,
    TEXTS,
    THREADS,
    YES_OR_NO,
    among,
)
from kybernate_shim.config.reading import DEFAULT_PATH, keeping, read, read_file
from kybernate_shim.sizes import NodeSizes

# What nvidia-container-cli and NVIDIA's CDI specifications mount: programs, libraries, firmware and sockets of the
# driver.
HOOK_MOUNTS: Final = (
    "/usr/bin/nvidia-*",
    "/usr/lib/*/libnvidia-*",
    "/usr/lib/*/libcuda*",
    "/usr/lib/*/libnvcuvid*",
    "/usr/lib/*/libnvoptix*",
    "/usr/lib/*/vdpau/libvdpau_nvidia*",
    "/usr/lib64/libnvidia-*",
    "/usr/lib64/libcuda*",
    "/lib/firmware/nvidia/*/gsp_*.bin",
    "/usr/lib/firmware/nvidia/*/gsp_*.bin",
    "/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
    "/usr/share/nvidia/*",
)


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of work may take, in seconds; 0: no limit. What outlives its deadline is killed."""

    create: float = setting(120.0, SECONDS, "the OCI runtime creates a container", by=OPTIONS)
    start: float = setting(120.0, SECONDS, "it starts one, hooks included", by=OPTIONS)
    exec: float = setting(120.0, SECONDS, "it starts a further process in one", by=OPTIONS)
    kill: float = setting(10.0, SECONDS, "it sends a signal", by=OPTIONS)
    query: float = setting(10.0, SECONDS, "it answers `features`, for `-info`", by=OPTIONS)
    delete: float = setting(30.0, SECONDS, "it removes a container", by=OPTIONS)
    freeze: float = setting(30.0, SECONDS, "it pauses or resumes one", by=OPTIONS)
    update: float = setting(30.0, SECONDS, "it changes the limits of one", by=OPTIONS)
    checkpoint: float = setting(
        3600.0, SECONDS, "a checkpoint, all steps together: 1 TiB at 300 MB/s takes this long", by=OPTIONS
    )
    hold: float = setting(
        600.0,
        HOLD,
        "a container stays frozen after `kybernate checkpoint --hold`, before it runs on by itself",
        by=OPTIONS,
    )
    restore: float = setting(1800.0, SECONDS, "a restore, all steps together: 512 GiB at 300 MB/s", by=OPTIONS)
    io_drain: float = setting(
        10.0, SECONDS, "a process that has ended may leave output unread before Delete continues", by=OPTIONS
    )


@dataclass(frozen=True)
class GpuSettings:
    """How GPU state is taken out and brought back. The driver's steps may take so many seconds each."""

    lock: float = setting(60.0, SECONDS, "queued work of all processes drains", by=OPTIONS)
    checkpoint: float = setting(600.0, SECONDS, "VRAM is offloaded to host memory", by=OPTIONS)
    restore: float = setting(600.0, SECONDS, "it is reloaded", by=OPTIONS)
    unlock: float = setting(30.0, SECONDS, "processes may use the driver again", by=OPTIONS)
    data_path: Literal["fast", "plain"] = setting(
        "fast",
        among("fast", "plain"),
        "whether VRAM bytes are written directly, by several threads, or through CRIU",
        by=OPTIONS,
    )
    huge_pages: Literal["process", "node", "off"] = setting(
        "process",
        among("process", "node", "off"),
        "whether VRAM is offloaded to huge pages, which halves the time: of its process alone, or by the node's switch,"
        " which is `always` meanwhile, for all programs",
    )
    threads: int = setting(0, THREADS, "threads that move VRAM bytes", unset="one for each CPU, at most 16", by=OPTIONS)
    arena: NodeSizes = setting(
        (),
        NODE_SIZES,
        "pinned host memory of the node for VRAM that is copied at the speed of the link",
        unset="there is none",
    )
    arena_containers: Literal["annotated", "all"] = setting(
        "annotated",
        among("annotated", "all"),
        'which containers with GPUs can use it: those with `kybernate.io/arena: "true"`, or all but `"false"`',
        since=CONTAINER,
    )
    arena_share: float = setting(
        1.0,
        SHARE,
        "part of the arena that one pod may have, or one container without a pod; the driver offloads what exceeds it",
    )
    image_pool: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "directory on the tmpfs of images that are kept in memory, with memory that is ready for them",
        unset="there is none",
    )
    image_pool_files: tuple[int, ...] = setting(
        (), SIZES, "what is allocated there: one file for the VRAM of each process of such an image"
    )
    helper_idle: float = setting(900.0, SECONDS, "the node's CUDA helper ends after this time without a call")
    visible_devices_env: bool = setting(
        False,
        YES_OR_NO,
        "a restore uses NVIDIA_VISIBLE_DEVICES of a pod, which its author can set; false: only devices count that"
        " containerd has put into the container's configuration, as by CDI",
    )
    denied_drivers: tuple[str, ...] = setting(
        ("570.158.*", "595.*"), TEXTS, "driver versions whose checkpoints are refused; `*` stands for any text"
    )


@dataclass(frozen=True)
class Config:
    """All settings. `warnings` are sentences for the log about keys that had no effect."""

    runtime: str = setting(
        "",
        TEXT,
        "OCI runtime, as a path or as a name in PATH",
        by=OPTIONS,
        unset="by need: nvidia-container-runtime for GPUs, else runc",
        since=CONTAINER,
    )
    runtime_root: Path = setting(
        Path("/run/containerd/runc"),
        DIRECTORY,
        "where the OCI runtime keeps its state; the containerd namespace is appended",
        by=OPTIONS,
        since=CONTAINER,
    )
    systemd_cgroup: bool | None = setting(
        None,
        SWITCH,
        'whether systemd makes the cgroups; "auto" decides by the form of each container\'s cgroupsPath',
        by=OPTIONS,
        unset='"auto"',
        since=CONTAINER,
    )
    criu: Path | None = setting(None, CRIU, "CRIU's program", by=OPTIONS, unset="found in PATH", since=CONTAINER)
    criu_libdir: Path | None = setting(None, OPTIONAL_PATH, "CRIU's plugins", by=OPTIONS, unset="none are loaded")
    checkpoint_root: Path = setting(
        Path("/var/lib/kybernate/checkpoints"), DIRECTORY, "where relative names of checkpoint images are looked up"
    )
    memory_root: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "directory of a tmpfs in which the agent keeps copies of images; a restore by name takes the copy",
        unset="none",
    )
    trusted_roots: tuple[Path, ...] = setting(
        (),
        DIRECTORIES,
        "further directories from which pods may name images by path; root's own, writable by no other user",
    )
    restore_from_env: bool = setting(
        False, YES_OR_NO, "pods may name an image by the environment variable RESTORE_FROM, too"
    )
    hook_mounts: tuple[str, ...] = setting(
        HOOK_MOUNTS,
        TEXTS,
        "paths of the node that a restore may mount where the image says that a hook had mounted them; `*` stands for "
        "any text but /",
        unset="NVIDIA's driver files",
    )
    key_directory: Path = setting(
        Path("/var/lib/kybernate/keys"), DIRECTORY, "keys that sign and verify images; `node.key` is made at first use"
    )
    shared_key: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file with the key that signs images which move between nodes",
        unset="the node's own key signs",
    )
    work_root: Path = setting(
        Path("/var/lib/kybernate/work"), DIRECTORY, "scratch space and logs of checkpoints and restores"
    )
    parking_root: Path = setting(
        Path("/var/lib/kybernate/parked"),
        DIRECTORY,
        "where the VRAM of parked containers lies, encrypted, until they are woken: on a disk",
    )
    log_file: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file for the daemons' logs, in addition to containerd's",
        unset="containerd's log alone",
        since=POD,
    )
    audit_log: Path | None = setting(
        Path("/var/log/kybernate/audit.jsonl"),
        OPTIONAL_PATH,
        "file with one line of JSON for each checkpoint, restore, suspend, resume and import, allowed or refused",
    )
    log_level: str = setting(
        "info", LEVEL, "the least severe message that is logged; containerd's -debug lowers it", since=POD
    )
    verify: bool = setting(
        True, YES_OR_NO, "compare every byte of an image with its digests before a restore", by=OPTIONS
    )
    annotations: tuple[str, ...] = setting(
        ("kybernate.io/*",),
        TEXTS,
        "annotations that pods may use; `*` stands for any text",
    )
    volumes_limit: int = setting(
        8 << 30,
        BYTES,
        "most bytes of the volumes that live and die with a pod, emptyDir and /dev/shm, which one image may have",
        by=OPTIONS,
        unset='`"8GiB"`',
    )
    dump_memory: int = setting(
        16 << 30,
        BYTES,
        "most memory of the node that files of checkpoints take while containers are frozen, where a disk would make "
        "them wait; 0: none",
        by=OPTIONS,
        unset='`"16GiB"`',
    )
    max_freeze: float = setting(
        0.0,
        SECONDS,
        "how long a checkpoint may freeze a container, where neither its request nor its pod says otherwise; 0: any "
        "time",
        by=OPTIONS,
    )
    encryption_key: Path | None = setting(
        None,
        OPTIONAL_PATH,
        "file with the keys that encrypt checkpoint images: root's own, mode 0600, 64 hexadecimal digits a line",
        unset="images are not encrypted",
    )
    runtime_in_memory: bool = setting(
        True,
        YES_OR_NO,
        "the fork server keeps runc or crun, some 10 MiB, in sealed memory: they need not copy themselves for each "
        "container and exec",
        since=SERVER,
    )
    fork_server_idle: float = setting(
        900.0,
        SECONDS,
        "the node's fork server ends after this time without a start or a removal; 0: there is none",
        since=SERVER,
    )
    fork_server_tuning: bool = setting(
        True,
        YES_OR_NO,
        "the fork server changes its interpreter so that pods share its memory, 3 MiB and more each; false: it is left "
        "as it is, for an interpreter that does not support that",
        since=SERVER,
    )
    deadlines: Deadlines = table(Deadlines)
    gpu: GpuSettings = table(GpuSettings)
    warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path = DEFAULT_PATH) -> Config:
        """Read the node's file; without one, every setting has its default. Raises ConfigInvalid."""
        result, warnings = read_file(cls(), path)
        return replace(result, warnings=warnings)

    def merged(self, new: str | Mapping[str, Any], *, source: str = "runtime options", by: str = OPTIONS) -> Config:
        """Return these settings with those of `new`, TOML text or its parsed form, in their place.

        With `by=OPTIONS`, keys that only the node's file may set are left out with a warning. Raises ConfigInvalid.
        """
        result, warnings = read(self, new, source=source, by=by)
        return replace(result, warnings=(*self.warnings, *warnings))

    @property
    def image_roots(self) -> tuple[tuple[Path, bool], ...]:
        """The directories below which images lie, and whether pods name those below it by path."""
        memory = () if self.memory_root is None else ((self.memory_root, False),)
        return ((self.checkpoint_root, False), *memory, *((root, True) for root in self.trusted_roots))

    def replaced_by(self, new: Config) -> Config:
        """Return `new`, but for the settings that a container keeps for as long as it lives: these are as here."""
        return keeping(self, new)

    def pod_may_use(self, annotation: str) -> bool:
        """Return whether the annotation of that name counts when a pod carries it."""
        return any(fnmatchcase(annotation, pattern) for pattern in self.annotations)

    def pods_choice(self, annotations: Mapping[str, str], name: str) -> str:
        """Return the value of a pod's annotation, "" where there is none or where it does not count."""
        return annotations.get(name, "") if self.pod_may_use(name) else ""
