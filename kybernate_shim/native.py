"""Compiles what is written in C: `python3 kybernate_shim/native.py [FOLDER]`, with any C compiler.

Needs nothing but Python itself: it runs before the package is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent
COMMON = ("-std=gnu11", "-O2", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror")


class Product(NamedTuple):
    """A file that is compiled from `units` in a folder of the package, where it lies, too."""

    folder: str
    name: str
    units: tuple[str, ...]
    flags: tuple[str, ...]
    wanted: tuple[str, ...] = ()  # flags that are left out where the toolchain has not what they need

    def of(self, package: Path = PACKAGE) -> Path:
        """Return the file's path in a package."""
        return package / self.folder / self.name


PRELOAD = Product(
    "preload",
    "libkybernate-arena.so",
    (
        *("lookup", "memory", "ranges", "owners", "physical", "placeholders", "exports", "blocks", "addresses"),
        *("imports", "answer", "rwlocks", "heap", "ipc", "charges", "ledger", "counted", "uses", "turn"),
    ),
    (
        *("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libkybernate-arena.so"),
        # Older C libraries keep these apart; newer ones have both files for old programs.
        *("-Wl,-z,defs", "-Wl,-z,nodelete", "-Wl,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2"),
    ),
)
CLIENT = Product("fork_server", "client", ("client",), ())
HOLDER = Product("checkpoint", "hold-restored", ("hold_restored",), (), ("-static",))  # starts in half the time
JOINER = Product("checkpoint", "libkybernate-join-user.so", ("join_user",), ("-fPIC", "-shared", "-Wl,-z,defs"))
PRODUCTS = (PRELOAD, CLIENT, HOLDER, JOINER)


def build(product: Product, package: Path = PACKAGE, *flags: str) -> Path:
    """Compile a product into `package`, unless it is newer than its sources there, and return its path.

    Raises subprocess.CalledProcessError, with the compiler's words on stderr, and FileNotFoundError without one.
    """
    file, sources = product.of(package), PACKAGE / product.folder
    newest = max(path.stat().st_mtime for path in (*sources.glob("*.[ch]"), Path(__file__)))
    if file.exists() and file.stat().st_mtime >= newest:
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    units = [str(sources / f"{unit}.c") for unit in product.units]
    compiler = os.environ.get("CC", "cc").split()
    command = [*compiler, *COMMON, *units, *product.flags, *flags, "-o", str(new)]
    if (
        not product.wanted
        or subprocess.run([*command, *product.wanted], stderr=subprocess.DEVNULL, check=False).returncode
    ):
        subprocess.run(command, check=True)
    new.replace(file)  # programs that have the old one mapped keep it
    return file


if __name__ == "__main__":
    for product in PRODUCTS:
        print(build(product, Path(sys.argv[1]) if sys.argv[1:] else PACKAGE))  # noqa: T201  # what a Makefile and a person want to know
