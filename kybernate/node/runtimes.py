"""The OCI runtimes of this node, and their versions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from kybernate.node.finding import HealthFinding, ask_program, compared
from kybernate_shim.checkpoint.criu.config import parse_version
from kybernate_shim.config import Config
from kybernate_shim.imports import DRIVER
from kybernate_shim.oci.select import DIRECTORIES, GPU_RUNTIME

RUNC = ((1, 1), (1, 5))  # the oldest and the newest that are tested


def runtimes(config: Config) -> Iterator[HealthFinding]:
    """Report on the OCI runtimes."""
    for name in ("runc", "crun"):
        if program := shutil.which(name):
            status, words = ask_program(program, "--version")
            first = words.splitlines()[0] if words else program
            yield HealthFinding(name, "bad", first) if status else _tested(name, first)
        elif name == "runc":
            yield HealthFinding(name, "bad", "not in PATH", "install runc, or name another by `runtime`")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, DIRECTORIES[GPU_RUNTIME])])
    if program := shutil.which(GPU_RUNTIME, path=path):
        yield HealthFinding(GPU_RUNTIME, "ok", program)
    elif DRIVER.exists():
        yield HealthFinding(
            GPU_RUNTIME, "note", "missing", "containers that request GPUs need it; install NVIDIA's toolkit"
        )


def _tested(name: str, found: str) -> HealthFinding:
    """Compare a version with those that are tested. One of crun's is as good as another."""
    version = next((word for word in found.split() if parse_version(word)), "")
    return compared(name, found, version, RUNC if name == "runc" else None)
