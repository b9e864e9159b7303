"""Where the fork server of this installation listens.

The name is made from the files of the installation, not from its version: after an upgrade, with another interpreter or
in another mount namespace there is another name, and a client cannot even find the wrong server. client.c computes the
same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kybernate_shim.run_directory import RUN

DIRECTORY = str(RUN / "fork-server")
PROGRAM = "containerd-shim-kybernate-v1"
BITS = (1 << 64) - 1
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def socket_path() -> str:
    """Return the address of the server that was made from the same files as this process."""
    package = Path(__file__).parents[1]
    facts = (
        *_identity((package / "__init__.py").stat()),
        *_identity(package.parent.stat(), of_content=True),  # where dependencies are added and removed
        *_identity(Path(sys.executable).stat()),
        Path("/proc/self/ns/mnt").stat().st_ino,
    )
    return f"{DIRECTORY}/{_fnv_1a(' '.join(map(str, facts)).encode()):016x}"


def _identity(status: os.stat_result, *, of_content: bool = False) -> tuple[int, int, int]:
    """Return what no two files share, even if one replaces the other; of a directory, the entries' time.

    A file's status changes with its replacement, whatever time an archive gives to its content.
    """
    return status.st_dev, status.st_ino, status.st_mtime_ns if of_content else status.st_ctime_ns


def _fnv_1a(data: bytes) -> int:
    """Return the 64-bit hash. Source: Fowler, Noll and Vo, draft-eastlake-fnv."""
    value = FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * FNV_PRIME & BITS
    return value
