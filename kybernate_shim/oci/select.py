"""Decides which OCI runtime runs a container, and with which global flags."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kybernate_shim.config import Config
from kybernate_shim.errors import Missing
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.spec import Spec

VARIABLE = "KYBERNATE_RUNTIME"
GPU_RUNTIME = "nvidia-container-runtime"
PLAIN_RUNTIME = "runc"
# In addition to PATH: the GPU operator installs into the last one, which is in no PATH.
DIRECTORIES = {GPU_RUNTIME: (Path("/usr/bin"), Path("/usr/local/nvidia/toolkit")), PLAIN_RUNTIME: ()}


def _missing(name: str, because: str, places: list[str], advice: str) -> Missing:
    where = f" (looked in {', '.join(places)})" if places else ""
    return Missing(f'OCI runtime "{name}" not found{where}; it was requested by {because}. {advice}')


def choose_runtime(env: Mapping[str, str], options: RuntimeOptions, config: Config, spec: Spec) -> Path:
    """Return the runtime's program: the first that environment, options, configuration or need name, in this order.

    `env` is the daemon's, `config` the effective one. A name without a slash is looked up in PATH.
    Raises Missing: a runtime that was named and is missing is never replaced by another.
    """
    name, because = _wanted(env, options, config, spec)
    if "/" in name:
        return _at(Path(name), because)
    places = list(_places(name, env))
    for directory in places:
        if _is_program(directory / name):
            return directory / name
    raise _missing(name, because, [str(place) for place in places], _advice(name))


def resolve_cli(binary: Path, *, namespace: str, log: Path, options: RuntimeOptions, config: Config, spec: Spec) -> Cli:
    """Return how to call `binary` for one container: its state directory, its log and who makes its cgroups."""
    root = Path(options.root or config.runtime_root) / namespace
    return Cli(binary, root, log, systemd_cgroup=uses_systemd(options, config, spec))


def uses_systemd(options: RuntimeOptions, config: Config, spec: Spec) -> bool:
    """Return whether systemd makes the container's cgroups.

    Runtimes refuse a cgroupsPath whose form does not fit their flag, so the form decides where nothing else is
    configured; the options, which often lack the flag, decide only where the spec names no cgroup.
    """
    if config.systemd_cgroup is not None:
        return config.systemd_cgroup
    return spec.systemd_style if spec.cgroups_path else options.systemd_cgroup


def _wanted(env: Mapping[str, str], options: RuntimeOptions, config: Config, spec: Spec) -> tuple[str, str]:
    if name := env.get(VARIABLE):
        return name, f"the environment variable {VARIABLE}"
    if options.binary_name:
        return options.binary_name, "BinaryName in the runtime options"
    if config.runtime:
        return config.runtime, "`runtime` in the configuration"
    if reason := spec.requests_gpu():
        return GPU_RUNTIME, f"the container's {reason}"
    return PLAIN_RUNTIME, "every container that requests no GPU and names no other runtime"


def _at(path: Path, because: str) -> Path:
    if not _is_program(path):
        raise _missing(str(path), because, [], "Install it there, as an executable file, or name another one.")
    return path


def _places(name: str, env: Mapping[str, str]) -> Iterator[Path]:
    path = [Path(entry) for entry in env.get("PATH", os.defpath).split(os.pathsep) if entry]
    yield from dict.fromkeys((*path, *DIRECTORIES.get(name, ())))


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _advice(name: str) -> str:
    if name == GPU_RUNTIME:
        return "Install the NVIDIA container toolkit, or name another runtime by `runtime` in /etc/kybernate/shim.toml."
    return "Install it, or name another runtime by `runtime` in /etc/kybernate/shim.toml."
