"""Gives a node of the cluster a pretended driver with two GPUs. Run inside the node, as a program of its own.

The cluster's lanes have no container toolkit of NVIDIA's, and the device plugin needs none: it gives device nodes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.fakes.cuda import Gpus, build
from tests.system.gpu.node import GPUS, forget_helper
from tests.system.gpu.toolkit import LIBRARIES, NAMES, NODES

COUNT = 2


def install() -> None:
    """Put the driver's libraries, its GPUs and their device nodes in their places."""
    built = build()
    for name in NAMES:
        shutil.copy(built / f"{name}.1", LIBRARIES / f"{name}.1")
    subprocess.run(["ldconfig"], check=True)
    for node in NODES:  # bind mounts of /dev/null, as in the other lanes
        node.touch()
        subprocess.run(["mount", "--bind", "/dev/null", node], check=True)
    Gpus.create(GPUS, count=COUNT, size=512 << 20)
    shutil.copytree(built, GPUS / "driver")  # for containers, which have the directory
    shutil.copy(Path(__file__).parents[1] / "fakes/cuda/computes.py", GPUS / "driver")


def remove() -> None:
    """Make it a node without GPUs again."""
    forget_helper()
    for node in NODES:
        subprocess.run(["umount", node], check=True)
        node.unlink()
    for name in NAMES:
        (LIBRARIES / f"{name}.1").unlink()
    subprocess.run(["ldconfig"], check=True)
    shutil.rmtree(GPUS)


if __name__ == "__main__":
    {"install": install, "remove": remove}[sys.argv[1]]()
