"""Rehearses `tests/gpu/run` in the lab, on the pretended driver: `python -m tests.gpu.rehearse [its options]`.

With `against` first, it rehearses `tests/gpu/arena_bench --against DIRECTORY`, with `bench` first `tests/gpu/bench`,
with `serve` first `tests/gpu/serve`, with `together` first `tests/gpu/together run`, whose plan's jobs are `python -m
tests.gpu.rehearse node …`, which rehearses the rest on a node that has its pretended GPUs already.
Run by tests/lab/run LANE -- /opt/kybernate/bin/python -m tests.gpu.rehearse. It needs build/gpu-kit of the lab's Python
(python -m tests.gpu.kit --python 3.13), of which it uses the wheels. What runs there also proves the code of this
folder; seconds and bytes mean nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from kybernate_shim.arena.memory import FOLDER, Memory
from kybernate_shim.cuda_worker.kernel import machine_code
from tests.gpu import arena_bench, bench, models, report, together
from tests.system.gpu import CAPABILITY, PROGRAMS, install_driver, toolkit

ARENA_GIB = 1
PRETENDED_MIB = "512"  # of each GPU of a node next to others
TINY = (
    "--gib",
    "0.06,0.12",
    "--container-gib",
    "0.01",
    "--rounds",
    "2",
    "--swap-rounds",
    "2",
    "--container-rounds",
    "2",
)
ROOT = Path("/run/kybernate-gpu")  # a tmpfs: the lab's own root is an overlay, on which no other can lie


def rehearse(argv: list[str]) -> int:
    if argv[:1] == ["node"]:
        return on_a_node(argv[1:])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, not by each program of each node
    os.environ["PYTHONPYCACHEPREFIX"] = "/tmp/compiled"
    end_containerd()
    install_driver()
    subprocess.run(["umount", toolkit.KERNEL], check=True)  # no container of the kit has it
    if argv[:1] == ["together"]:
        status = together.main(["run", "--pretended-mib", PRETENDED_MIB, *argv[1:]])
        print(together.shown(together.folder_of(argv[1:])))
        return status
    return on_a_node(argv)


def on_a_node(argv: list[str]) -> int:
    Memory(((0, ARENA_GIB << 30),)).prepare()
    machine_code(FOLDER, *CAPABILITY)  # here, where the compiler may be slow, and before anything is frozen
    ROOT.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", ROOT], check=True)
    where = ["--root", str(ROOT / "node"), "--pretended", str(PROGRAMS)]
    if argv[:1] == ["bench"]:
        return bench.main([*where, *argv[1:]])
    if argv[:1] == ["serve"]:
        return models.main([*where, "--arena", str(ARENA_GIB), *argv[1:]])
    if argv[:1] == ["against"]:
        return arena_bench.main([*where, *TINY, "--against", *argv[1:]])
    return report.main([*where, "--arena", str(ARENA_GIB), "--mib", "16", *argv])


def end_containerd() -> None:
    """End the lab's own containerd, whose socket the one of the kit needs."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "containerd":
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    sys.exit(rehearse(sys.argv[1:]))
