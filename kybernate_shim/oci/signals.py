"""Sends a signal to a container's init without executing the runtime.

`kill` of runc and crun checks that the container runs, signals init, and, for a SIGKILL, thaws a frozen container,
whose processes could not die before on cgroup version 1. Sources: Signal in libcontainer/container_linux.go of runc 1.1
to 1.5, libcrun_container_kill in crun's container.c. Wherever more may be needed, the runtime does it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from signal import SIGKILL

from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.freezer import is_known


def send(cli: Cli, init: int, number: int, cgroup: Cgroup | None) -> bool:
    """Signal `init`, which is not reaped yet, so its pid is not reused; return False where the runtime has to."""
    try:
        if not is_known(cli):
            return False
        os.kill(init, number)
    except OSError:
        return False  # not as we know it
    if number == SIGKILL and cgroup is not None:
        with suppress(OSError):  # with init, its cgroup may be gone already
            if cgroup.is_held:  # a stopped thread in a cgroup that could not be frozen completely does not end either
                cgroup.thaw()
    return True
