"""Gives a node of the cluster a pretended driver with two GPUs. Run inside the node, as a program of its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.fakes.cuda import Gpus, build
from tests.system.gpu import toolkit
from tests.system.gpu.node import GPUS, forget_helper


def install() -> None:
    """Put the driver, its GPUs, and the configuration and specification of NVIDIA's toolkit in their places."""
    built = build()
    toolkit.install(built)
    Gpus.create(GPUS, count=toolkit.GPUS, size=512 << 20)
    toolkit.specify()
    shutil.copytree(built, GPUS / "driver")  # for containers that get device nodes alone, which have the directory
    shutil.copy(Path(__file__).parents[1] / "fakes/cuda/computes.py", GPUS / "driver")


def remove() -> None:
    """Make it a node without GPUs again."""
    forget_helper()
    toolkit.remove()
    shutil.rmtree(GPUS)


if __name__ == "__main__":
    {"install": install, "remove": remove}[sys.argv[1]]()
