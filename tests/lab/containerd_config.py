"""containerd's configuration in a node, in the form that each version wants.

Sources: containerd's docs/cri/config.md of 1.7, 2.1 and 2.4; containerd-config.toml(5) of 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.lab.criu_limits import has_sys_resource
from tests.lab.lanes import Lane

SOCKET = Path("/run/containerd/containerd.sock")
STREAM_PORT = 10010
SHIM = "/usr/local/bin/containerd-shim-kybernate-v1"
PAUSE = "localhost:5000/pause:latest"

RUNTIMES = {
    "runc": {"runtime_type": "io.containerd.runc.v2"},
    "kybernate": {"runtime_type": "io.containerd.kybernate.v1"},
    "kybernate-path": {"runtime_type": "io.containerd.runc.v2", "runtime_path": SHIM},
}
ANNOTATIONS = '["kybernate.io/*", "org.criu.config"]'  # more than is packaged, as an administrator may pass on

# Where each form keeps the same things: containerd's socket, the streaming server, pods, images, and the sandbox
# image's key.
_STREAMS, _PODS, _IMAGES = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"
TABLES = {
    2: ("grpc", _STREAMS, _STREAMS, _STREAMS, ""),
    3: ("grpc", _STREAMS, _PODS, _IMAGES, "pinned_images"),
    4: ('plugins."io.containerd.server.v1.grpc"', _STREAMS, _PODS, _IMAGES, "pinned_images"),
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
    socket, server, pods, images, pinned = TABLES[lane.config_version]
    tables: dict[str, dict[str, str]] = {
        socket: {"address": f'"{SOCKET}"'},
        "debug": {"level": f'"{log_level}"'},
        plugin(server): {"stream_server_address": '"127.0.0.1"', "stream_server_port": f'"{STREAM_PORT}"'},
    }
    tables.setdefault(plugin(images, pinned), {})["sandbox" if pinned else "sandbox_image"] = f'"{PAUSE}"'
    # Without it, CRI cannot give sandboxes a lower OOM score than its own.
    tables.setdefault(plugin(pods), {})["restrict_oom_score_adj"] = "false" if has_sys_resource() else "true"
    if lane.config_version < 3:
        tables[plugin(pods)]["enable_cdi"] = "true"  # as later versions have it
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
