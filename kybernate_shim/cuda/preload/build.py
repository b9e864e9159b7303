"""Compiles the preload library: `python3 kybernate_shim/cuda/preload/build.py [FOLDER]`, with any C compiler.

Needs nothing but Python itself: it runs before the package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent
NAME = "libkybernate-arena.so"
UNITS = ("lookup", "memory", "ranges", "owners", "physical", "blocks", "answer")
FLAGS = (
    *("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-D_GNU_SOURCE"),
    *("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror"),
    # Older C libraries keep these apart; newer ones have both files for old programs.
    *("-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2"),
)


def build(folder: Path = SOURCES) -> Path:
    """Compile the library into `folder`, unless it is newer than its sources there, and return its path.

    Raises subprocess.CalledProcessError, with the compiler's words on stderr, and FileNotFoundError without one.
    """
    library = folder / NAME
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir() if path.suffix in (".c", ".h", ".py"))
    if library.exists() and library.stat().st_mtime >= newest:
        return library
    new = folder / f".{NAME}.{os.getpid()}"
    files = [str(SOURCES / f"{unit}.c") for unit in UNITS]
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, *files, *FLAGS, f"-Wl,-soname,{NAME}", "-o", str(new)], check=True)
    new.replace(library)  # programs that have the old one mapped keep it
    return library


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:2])))  # noqa: T201  # what a Makefile and a person want to know
