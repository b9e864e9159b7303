"""Compiles the pretended driver and its test program with the machine's gcc."""

from __future__ import annotations

import fcntl
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
HASHING = SOURCES.parents[2] / "kybernate_shim/cuda_worker/hashing.cu"  # runs on a pretended GPU, too
DRIVER = (
    "entry",
    "errors",
    "program",
    "gate",
    "holding",
    "memory",
    "physical",
    "devices",
    "virtual",
    "pointers",
    "queries",
    "pinned",
    "copies",
    "fills",
    "streams",
    "values",
    "graphs",
    "kernels",
    "hashes",
    "restorer",
    "moving",
    "verbs",
    "switches",
    "gpus",
)
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-O3", "-g", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror"),
)


def build(out: Path | None = None) -> Path:
    """Compile what has changed and return the folder that holds libcuda.so.1, libnvidia-ml.so.1 and `computes`.

    `out` defaults to a folder of this checkout's build/ that is named after the C library, since one checkout serves
    machines with different ones. Two concurrent builds wait for each other.
    Raises subprocess.CalledProcessError; the compiler's words are on stderr.
    """
    out = out or SOURCES.parents[2] / "build" / f"fake-cuda-{'-'.join(platform.libc_ver())}"
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _compile(out / "libcuda.so.1", DRIVER, ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-z,defs"])
        _compile(
            out / "libnvidia-ml.so.1", ("nvml", "gpus"), ["-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-z,defs"]
        )
        _compile(out / "computes", ("computes",), ["-ldl"])
    return out


def _compile(target: Path, units: Sequence[str], options: Sequence[str]) -> None:
    if target.exists() and target.stat().st_mtime > _newest_source():
        return
    files = [str(SOURCES / f"{unit}.c") for unit in units]
    new = target.with_suffix(".new")
    subprocess.run(["gcc", *FLAGS, "-o", new, *files, *options], check=True)
    new.rename(target)  # a program that runs from the old file keeps it


def _newest_source() -> float:
    sources = [HASHING, *(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))]
    return max(path.stat().st_mtime for path in sources)
