"""What a bundle needs for GPUs that only a plain start would give it.

NVIDIA's runtime edits config.json at `create` and passes every other command on as it is, so a container that is
restored would have neither devices nor libraries. It is therefore run once with a program that does nothing in place of
the runtime below it. Its hooks are taken out: they would work on a root filesystem that CRIU has not made yet, and what
they mounted is in the image's mounts. What they allowed in the device cgroup is put into the spec instead.
Source: github.com/NVIDIA/nvidia-container-toolkit, internal/runtime (HasCreateSubcommand, the order of `runtimes`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kybernate_shim.linux.temporary_directory import scratch_directory
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.runtime import Runtime
from kybernate_shim.oci.select import GPU_RUNTIME
from kybernate_shim.oci.spec import EARLY_HOOKS, GPU_HOOKS, Spec, edit_spec

LOWER_RUNTIMES = ("docker-runc", "runc", "crun")  # what the toolkit looks for in PATH, in its order
SHARED_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
NONE = ("", "void", "none")


async def prepare_restore(runtime: Runtime, bundle: Bundle, container: str, *, believe_environment: bool) -> Spec:
    """Add the GPUs to the bundle of a container that is to be restored; a bundle that has them stays as it is.

    Without `believe_environment`, NVIDIA_VISIBLE_DEVICES is ignored: the pod's author could name any GPU.
    Raises RuntimeFailed when NVIDIA's runtime refuses, Invalid and OSError.
    """
    if not believe_environment and Spec.read(bundle.path).env(VISIBLE) not in (None, *NONE):
        edit_spec(bundle.path, partial(set_environment, variables={VISIBLE: "void"}))
    if runtime.cli.binary.name == GPU_RUNTIME:
        await _let_runtime_edit(runtime, bundle, container)

    def change(document: dict[str, Any]) -> None:
        drop_gpu_hooks(document)
        add_devices(document)

    return edit_spec(bundle.path, change)


async def _let_runtime_edit(runtime: Runtime, bundle: Bundle, container: str) -> None:
    with scratch_directory("edits-", bundle.path) as directory:
        for name in LOWER_RUNTIMES:
            program = directory / name
            program.write_text("#!/bin/sh\nexit 0\n")
            program.chmod(0o700)
        path = f"{directory}:{runtime.env.get('PATH', os.defpath)}"
        editor = replace(runtime, env={**runtime.env, "PATH": path})
        await editor.create(f"{container}-edits", bundle, fds={})


def drop_gpu_hooks(document: dict[str, Any]) -> None:
    """Take the GPU vendor's early hooks out of a parsed config.json."""
    hooks = document.get("hooks") or {}
    for stage in EARLY_HOOKS:
        if stage in hooks:
            hooks[stage] = [hook for hook in hooks[stage] if Path(hook.get("path") or "").name not in GPU_HOOKS]


def add_devices(document: dict[str, Any], devices: Path = Path("/dev")) -> None:
    """Add the GPUs that NVIDIA_VISIBLE_DEVICES names by number, or all, where the spec has no GPU device at all.

    This is the case with hooks that make device nodes by themselves. A GPU that is named by its UUID cannot be
    distinguished from the others here: all of them are allowed then, and the driver's map decides.
    """
    spec = Spec(document)
    visible = spec.env(VISIBLE)
    if visible is None or visible in NONE or any(path.startswith("/dev/nvidia") for path in spec.devices):
        return
    linux = document.setdefault("linux", {})
    for name in (*SHARED_DEVICES, *_gpus(visible, devices)):
        node = _device(devices / name)
        if node is not None:
            linux.setdefault("devices", []).append(
                {"path": f"/dev/{name}", "fileMode": 0o666, "uid": 0, "gid": 0, **node}
            )
            rule = {"allow": True, "access": "rwm", **node}
            linux.setdefault("resources", {}).setdefault("devices", []).append(rule)


def _gpus(visible: str, devices: Path) -> Iterable[str]:
    wanted = visible.split(",")
    if all(name.isdecimal() for name in wanted):
        return [f"nvidia{name}" for name in wanted]
    return sorted(path.name for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdecimal())


def _device(path: Path) -> Mapping[str, Any] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISCHR(found.st_mode):
        return None
    return {"type": "c", "major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}


def set_environment(document: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Set environment variables of init in a parsed config.json, in the place of values that it has."""
    process = document.setdefault("process", {})
    kept = [entry for entry in process.get("env") or () if entry.partition("=")[0] not in variables]
    process["env"] = [*kept, *(f"{name}={value}" for name, value in variables.items())]
