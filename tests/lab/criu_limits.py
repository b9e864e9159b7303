"""CRIU on machines whose root lacks CAP_SYS_RESOURCE, as containers and virtual machines for tests often do.

There, the kernel does not let root read the resource limits of another user's process by prlimit(2), so that CRIU can
dump root's processes only. A node has that capability: without a bridge, no test could be about programs of other
users, which are most of those in production. The bridge, a library preloaded into CRIU alone, stands in for that one
right and for no other: it answers what the kernel has refused, from /proc, where root may read the same figures. It is
never a part of the product, and is not installed where the capability is there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

CAP_SYS_RESOURCE: Final = 24
SOURCE: Final = Path(__file__).with_name("limits_of_others.c")
SAID: Final = "CRIU reads the limits of other users' processes from /proc: root lacks CAP_SYS_RESOURCE here"


def has_sys_resource() -> bool:
    """Tell whether this process has CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_RESOURCE & 1)


def preloaded(library: Path) -> str:
    """Return what a shell script puts before CRIU's path: an assignment, "" where CRIU needs no bridge.

    `library` is compiled for it. Raises CalledProcessError.
    """
    if has_sys_resource():
        return ""
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return f"LD_PRELOAD={library}${{LD_PRELOAD:+:$LD_PRELOAD}} "


def install(criu: Path, program: Path, library: Path) -> bool:
    """Make `program`, earlier in PATH than `criu`, a CRIU with the bridge; return False where it needs none."""
    assignment = preloaded(library)
    if assignment:
        program.write_text(f'#!/bin/sh\n{assignment}exec {criu} "$@"\n')
        program.chmod(0o755)
    return bool(assignment)
