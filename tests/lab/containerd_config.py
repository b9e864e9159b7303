"""containerd's configuration in a node, in the form that each version wants.

Source: containerd's docs/cri/config.md of 1.7 and 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.lab.lanes import Lane

SOCKET = Path("/run/containerd/containerd.sock")
STREAM_PORT = 10010
SHIM = "/usr/local/bin/containerd-shim-kybernate-v1"
PAUSE = "localhost:5000/pause:latest"
CAP_SYS_RESOURCE = 24

RUNTIMES = {
    "runc": {"runtime_type": "io.containerd.runc.v2"},
    "kybernate": {"runtime_type": "io.containerd.kybernate.v1"},
    "kybernate-path": {"runtime_type": "io.containerd.runc.v2", "runtime_path": SHIM},
}
ANNOTATIONS = '["kybernate.io/*", "org.criu.config"]'  # more than is packaged, as an administrator may pass on

# Where each form keeps the same things: the streaming server, pods, images, and the sandbox image's key.
TABLES = {
    2: ("io.containerd.grpc.v1.cri", "io.containerd.grpc.v1.cri", "io.containerd.grpc.v1.cri", ""),
    3: ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images", "pinned_images"),
}


def text(
    lane: Lane,
    *,
    log_level: str,
    runtimes: Mapping[str, Mapping[str, str]] = RUNTIMES,
    default: str = "runc",
    mirrors: str = "",
) -> str:
    """Return config.toml for `lane`, with `runtimes`, CNI, and files in conf.d allowed to add to it.

    `default`: the runtime of pods that name none. `mirrors`: directory with a file for each image registry.
    """
    server, pods, images, pinned = TABLES[lane.config_version]
    tables: dict[str, dict[str, str]] = {
        "grpc": {"address": f'"{SOCKET}"'},
        "debug": {"level": f'"{log_level}"'},
        plugin(server): {"stream_server_address": '"127.0.0.1"', "stream_server_port": f'"{STREAM_PORT}"'},
    }
    tables.setdefault(plugin(images, pinned), {})["sandbox" if pinned else "sandbox_image"] = f'"{PAUSE}"'
    tables.setdefault(plugin(pods), {})["restrict_oom_score_adj"] = "false" if may_lower_oom_score() else "true"
    plugins = {"bin_dirs": '["/usr/lib/cni"]'} if lane.config_version > 2 else {"bin_dir": '"/usr/lib/cni"'}
    tables[plugin(pods, "cni")] = {**plugins, "conf_dir": '"/etc/cni/net.d"'}
    tables[plugin(pods, "containerd")] = {"default_runtime_name": f'"{default}"'}
    if mirrors:
        tables[plugin(images, "registry")] = {"config_path": f'"{mirrors}"'}
    for name, keys in runtimes.items():
        tables[plugin(pods, "containerd", "runtimes", name)] = {
            **{key: f'"{value}"' for key, value in keys.items()},
            "pod_annotations": ANNOTATIONS,
            "container_annotations": ANNOTATIONS,
        }
        if keys["runtime_type"] == "io.containerd.runc.v2":
            tables[plugin(pods, "containerd", "runtimes", name, "options")] = {"SystemdCgroup": "false"}
    lines = [f"version = {lane.config_version}", 'imports = ["/etc/containerd/conf.d/*.toml"]']
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {value}" for key, value in entries.items())]
    return "\n".join(lines) + "\n"


def plugin(name: str, *path: str) -> str:
    """Return the name of a plugin's table, or of one inside it."""
    return ".".join(["plugins", f'"{name}"', *(part for part in path if part)])


def may_lower_oom_score() -> bool:
    """Tell whether this process may give others a lower OOM score than its own, as CRI wants to for sandboxes."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_RESOURCE & 1)
