"""The preload library in a container: seen at a fixed place, and named in the environment of its processes.

It is mounted into /dev, which is the container's own tmpfs: nothing of it stays in the root filesystem, and it works
with any image. See kybernate_shim/preload for what it does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kybernate_shim.config import Config
from kybernate_shim.native import PRELOAD
from kybernate_shim.oci.annotations import VRAM, bytes_of
from kybernate_shim.oci.gpu_spec import set_environment
from kybernate_shim.oci.spec import Spec

ANNOTATION = "kybernate.io/arena"
LIBRARY = PRELOAD.of()
DESTINATION = "/dev/kybernate-arena.so"
VARIABLE = "LD_PRELOAD"
LEDGER = "/dev/kybernate-vram"  # the tmpfs on which the container's processes count what they have allocated
LIMIT = "KYBERNATE_VRAM"  # the bytes that are declared, and the file there
TURN = "/dev/kybernate-turn"  # the file that shows whether it is the turn of the container's seat
AWAITED = "KYBERNATE_TURN"  # names it


def wants_library(spec: Spec, config: Config) -> bool:
    """Return whether the container is to have the library: for moving its VRAM fast, or for what it has declared.

    The former is by its annotation or the node's setting.
    """
    if declared_vram(spec, config) and config.pods_choice(spec.annotations, ANNOTATION) != "false":
        return True
    return bool(config.gpu.arena) and asks_for_arena(spec, config)


def declared_vram(spec: Spec, config: Config) -> int:
    """Return the VRAM on each GPU that the container declares as its maximum, in bytes; 0 where it declares none."""
    return bytes_of(config.pods_choice(spec.annotations, VRAM))


def asks_for_arena(spec: Spec, config: Config) -> bool:
    """Return the same for a node that has an arena, or for one that has none yet."""
    chosen = config.pods_choice(spec.annotations, ANNOTATION)
    if chosen in ("true", "false"):
        return chosen == "true"
    return config.gpu.arena_containers == "all" and bool(config.gpu.arena) and spec.requests_gpu() is not None


def has_library(spec: Spec) -> bool:
    """Return whether the container was created with the library."""
    return any(mount.get("destination") == DESTINATION for mount in spec.document.get("mounts") or ())


def add_library(document: dict[str, Any], library: Path = LIBRARY) -> None:
    """Show the library in a parsed config.json, and have its process load it before all others. Idempotent."""
    _bind(document, library, DESTINATION)
    _load_library(document.setdefault("process", {}))


def _bind(document: dict[str, Any], source: Path, destination: str) -> None:
    mounts = document.setdefault("mounts", [])
    if not any(mount.get("destination") == destination for mount in mounts):
        options = ["bind", "ro", "nosuid", "nodev"]
        mounts.append({"destination": destination, "type": "bind", "source": str(source), "options": options})


def _load_library(process: dict[str, Any]) -> None:
    others: list[str] = []
    for entry in process.get("env") or ():
        name, _, value = entry.partition("=")
        if name == VARIABLE:
            others = [path for path in value.replace(":", " ").split() if path != DESTINATION]
    kept = [entry for entry in process.get("env") or () if entry.partition("=")[0] != VARIABLE]
    process["env"] = [*kept, f"{VARIABLE}={':'.join([DESTINATION, *others])}"]


def limit_vram(document: dict[str, Any], limit: int) -> None:
    """Have the library refuse what would be more than `limit` bytes of a GPU in all processes, in a parsed config.json.

    With 0, as for an image whose processes had a limit, only the file for their counts is added. Idempotent.
    """
    mounts = document.setdefault("mounts", [])
    if not any(mount.get("destination") == LEDGER for mount in mounts):
        options = ["nosuid", "nodev", "noexec", "mode=0777", "size=64k"]
        mounts.append({"destination": LEDGER, "type": "tmpfs", "source": "tmpfs", "options": options})
    if limit:
        set_environment(document, {LIMIT: f"{limit}:{LEDGER}/ledger"})


def show_turn(document: dict[str, Any], file: Path) -> None:
    """Have the library wait for the turn of the container's seat, which `file` shows, in a parsed config.json.

    Idempotent.
    """
    _bind(document, file, TURN)
    set_environment(document, {AWAITED: TURN})


def make_turn_file(file: Path) -> Path:
    """Make the file, with which it is the container's turn until the agent changes it. Raises OSError.

    What users of the container read through the mount, they cannot reach on the node.
    """
    for folder in reversed(file.parents[:3]):
        folder.mkdir(mode=0o711, exist_ok=True)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
    return file


def join(process: dict[str, Any], spec: Spec) -> None:
    """Have a process that an exec starts load the library, as the container's first process does. Idempotent.

    `process` is the exec's OCI object. What the container has declared counts for it as well.
    """
    _load_library(process)
    own = {name: value for name in (LIMIT, AWAITED) if (value := spec.env(name)) is not None}
    set_environment({"process": process}, own)
