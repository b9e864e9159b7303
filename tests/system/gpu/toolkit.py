"""NVIDIA's own container toolkit over the pretended driver: its runtime, its hooks and its specifications of this node.

The pretended driver's files lie where a machine has the real one's, so that `nvidia-ctk` makes the node's CDI
specification from them and from what NVML says, as on a machine with GPUs: a mount for each library, configuration
files that are links, a socket, firmware, device nodes, hooks. Two things stand in for the driver's kernel module:
device nodes are bind mounts of /dev/null, and /proc/driver/nvidia is a tmpfs on the node, and another one in a
container, made by a hook of the specification's own, since nothing can be created in /proc.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

RUNTIME = Path("/usr/bin/nvidia-container-runtime")
CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
SPECIFICATION = Path("/etc/cdi/nvidia.json")
VERSION = "580.159.04"  # that NVML says
LIBRARIES = Path(f"/usr/lib/{platform.machine()}-linux-gnu")  # where the toolkit looks, and the loader
NAMES = ("libcuda.so", "libnvidia-ml.so")
ELSEWHERE = Path("/opt/nvidia/share")  # configuration files, to which links lead from where loaders look
LINKED = {
    "glvnd/egl_vendor.d/10_nvidia.json": Path("/usr/share/glvnd/egl_vendor.d/10_nvidia.json"),
    "vulkan/icd.d/nvidia_icd.json": Path("/usr/share/vulkan/icd.d/nvidia_icd.json"),
}
PLAIN = (
    Path("/etc/OpenCL/vendors/nvidia.icd"),
    Path(f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
    Path("/usr/bin/nvidia-smi"),
)
PERSISTENCE = Path("/run/nvidia-persistenced/socket")
GPUS = 2
NODES = tuple(Path("/dev", name) for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(GPUS))))
KERNEL = Path("/proc/driver")
PARAMETERS = "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n"
MODULE = Path("/usr/local/bin/pretended-nvidia-module")  # a hook
MODULE_SOURCE = f"""#!/bin/sh
set -e
proc=$(sed -n 's/.*"bundle":"\\([^"]*\\)".*/\\1/p')/rootfs{KERNEL}
mount -t tmpfs -o mode=755 tmpfs "$proc"
cp -r {KERNEL}/nvidia "$proc"
"""


def visible(*gpus: int) -> list[str]:
    """Return ctr's flags that have NVIDIA's runtime give GPUs to a container."""
    return ["--env", f"NVIDIA_VISIBLE_DEVICES={','.join(map(str, gpus))}"]


def install(built: Path) -> None:
    """Give this node the driver's files of `built`, and the toolkit its configuration and specification.

    Skips the tests where the lab could not build the toolkit; it has said why.
    """
    if not RUNTIME.exists():
        pytest.skip("NVIDIA's container toolkit could not be built for this node")
    for name in NAMES:
        shutil.copy(built / f"{name}.1", LIBRARIES / f"{name}.{VERSION}")
        (LIBRARIES / f"{name}.1").symlink_to(f"{name}.{VERSION}")
        (LIBRARIES / name).symlink_to(f"{name}.1")
    subprocess.run(["ldconfig"], check=True)
    for name, link in LINKED.items():
        _write(ELSEWHERE / name, "{}\n")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ELSEWHERE / name)
    for path in PLAIN:
        _write(path, "#!/bin/sh\n")
        path.chmod(0o755)
    PERSISTENCE.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(PERSISTENCE))
    for node in NODES:
        node.touch()
        subprocess.run(["mount", "--bind", "/dev/null", node], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", KERNEL], check=True)
    _write(KERNEL / "nvidia/params", PARAMETERS)
    _write(CONFIG, '[nvidia-container-runtime]\nmode = "cdi"\nlog-level = "warning"\n')


def specify() -> None:
    """Write the node's CDI specification, for which the driver must know its GPUs."""
    _write(MODULE, MODULE_SOURCE)
    MODULE.chmod(0o755)
    generate = ["nvidia-ctk", "--quiet", "cdi", "generate", "--mode", "nvml", "--output", str(SPECIFICATION)]
    subprocess.run(generate, check=True)
    made = json.loads(SPECIFICATION.read_text())
    made["containerEdits"]["hooks"].insert(0, {"hookName": "createContainer", "path": str(MODULE)})
    SPECIFICATION.write_text(json.dumps(made))


def remove() -> None:
    """Take all of it away again."""
    subprocess.run(["umount", KERNEL, *NODES], check=True)
    libraries = [LIBRARIES / f"{name}{end}" for name in NAMES for end in ("", ".1", f".{VERSION}")]
    for path in (*NODES, *libraries, *LINKED.values(), *PLAIN, CONFIG, SPECIFICATION, MODULE):
        path.unlink()
    for directory in (ELSEWHERE, PERSISTENCE.parent):
        shutil.rmtree(directory)
    subprocess.run(["ldconfig"], check=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
