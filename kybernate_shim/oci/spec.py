"""What the shim reads in a bundle's config.json, and the one way to change it.

The document stays as it was parsed: the shim knows only part of the OCI specification, and what it does not know must
reach the runtime unharmed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate_shim.errors import Invalid
from kybernate_shim.linux.atomic_write import replacing

CDI_ANNOTATION = "cdi.k8s.io/"
CDI_VENDOR = "nvidia.com"
GPU_DEVICES = ("/dev/nvidia", "/dev/dxg")
GPU_VOLUMES = "/var/run/nvidia-container-devices"  # where a list of devices is given as mounts of /dev/null
GPU_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-ctk", "nvidia-cdi-hook")
EARLY_HOOKS = ("prestart", "createRuntime", "createContainer")


@dataclass(frozen=True)
class Spec:
    """A read-only view of config.json. `document` is its whole content; treat it as constant."""

    document: Mapping[str, Any]

    @classmethod
    def read(cls, bundle: Path, name: str = "config.json") -> Spec:
        """Read `<bundle>/config.json`, or a copy of it. Raises Invalid."""
        return cls(_load(bundle / name))

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.document.get("annotations") or {}

    @property
    def process(self) -> Mapping[str, Any]:
        return self.document.get("process") or {}

    @property
    def terminal(self) -> bool:
        return bool(self.process.get("terminal"))

    def env(self, name: str) -> str | None:
        """Return the value of an environment variable of init; of several, the last one, as in NVIDIA's runtime."""
        values = [entry.partition("=")[2] for entry in self.process.get("env") or () if entry.startswith(f"{name}=")]
        return values[-1] if values else None

    @property
    def mounts(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self.document.get("mounts") or ())

    @property
    def linux(self) -> Mapping[str, Any]:
        return self.document.get("linux") or {}

    @property
    def cgroups_path(self) -> str:
        return str(self.linux.get("cgroupsPath") or "")

    @property
    def systemd_style(self) -> bool:
        """Whether cgroupsPath has systemd's form, `slice:prefix:name`: exactly two colons and no slash."""
        return self.cgroups_path.count(":") == 2 and "/" not in self.cgroups_path

    def namespace_path(self, kind: str) -> str | None:
        """Return the path of the namespace to join, "" for a new private one, None for the host's."""
        for namespace in self.linux.get("namespaces") or ():
            if namespace.get("type") == kind:
                return str(namespace.get("path") or "")
        return None

    @property
    def own_pid_namespace(self) -> bool:
        """Whether the kernel kills all processes of the container when init ends."""
        return self.namespace_path("pid") == ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Paths of the device nodes in the container."""
        return tuple(str(device.get("path") or "") for device in self.linux.get("devices") or ())

    def requests_gpu(self) -> str | None:
        """Return what in the spec requests NVIDIA GPUs, in words for a message, or None."""
        return next(self._gpu_reasons(), None)

    def _gpu_reasons(self) -> Iterator[str]:
        visible = self.env("NVIDIA_VISIBLE_DEVICES")
        if visible not in (None, "", "void", "none"):
            yield f"environment NVIDIA_VISIBLE_DEVICES={visible}"
        for name, value in self.annotations.items():
            if name.startswith(CDI_ANNOTATION) and any(map(is_nvidia_cdi, value.split(","))):
                yield f"annotation {name}={value}"
        for path in self.devices:
            if path.startswith(GPU_DEVICES):
                yield f"device {path}"
        for mount in self.mounts:
            if str(mount.get("destination") or "").startswith(GPU_VOLUMES):
                yield f"mount {mount['destination']}"
        hooks = self.document.get("hooks") or {}
        for stage in EARLY_HOOKS:
            for hook in hooks.get(stage) or ():
                if Path(hook.get("path") or "").name in GPU_HOOKS:
                    yield f"{stage} hook {hook['path']}"


def edit_spec(bundle: Path, change: Callable[[dict[str, Any]], None]) -> Spec:
    """Let `change` alter the parsed config.json in place, write it back in one step, and return the result.

    Owner and mode are kept. When `change` raises, or the disk is full, the file is as it was. Raises Invalid.
    """
    path = bundle / "config.json"
    document = _load(path)
    change(document)
    before = path.stat()
    with replacing(path) as file:
        file.write(json.dumps(document, separators=(",", ":"), ensure_ascii=False))  # in C, unlike `dump`
        os.fchmod(file.fileno(), before.st_mode & 0o7777)
        os.fchown(file.fileno(), before.st_uid, before.st_gid)
    return Spec(document)


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Invalid(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise Invalid(f"{path}: not a JSON object")
    return document


def map_text(ranges: Iterable[Mapping[str, Any]]) -> str:
    """Return a map of ids, such as linux.uidMappings, as "inside:outside:count,…"."""
    return ",".join(f"{one.get('containerID', 0)}:{one.get('hostID', 0)}:{one.get('size', 0)}" for one in ranges)


def names_gpu(destination: str) -> bool:
    """Return whether a mount at this path, after links or before, names a GPU of NVIDIA's; its content is nothing."""
    return destination.removeprefix("/var").startswith(f"{GPU_VOLUMES.removeprefix('/var')}/")


def is_nvidia_cdi(device: str) -> bool:
    """Return whether a CDI device, by its qualified name, is one of NVIDIA's."""
    vendor = device.strip().partition("/")[0]
    return vendor == CDI_VENDOR or vendor.endswith(f".{CDI_VENDOR}")
