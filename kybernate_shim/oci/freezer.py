"""Pauses and resumes a container without executing the runtime.

`pause` and `resume` of runc and crun check that the container is in the right state, switch the freezer of its cgroup,
and record that nowhere: both recognize a paused container by its cgroup. Sources: Pause and Resume in
libcontainer/container_linux.go of runc 1.1 to 1.5, libcrun_container_pause_unpause in crun's container.c.
Wherever more may be needed, the runtime does it, and reports its own errors.
"""

from __future__ import annotations

import math
from functools import partial

from kybernate_shim.errors import Refused
from kybernate_shim.linux.cgroup.cgroup import Cgroup, FreezeTimedOut
from kybernate_shim.linux.threads import to_the_end
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.exec_fifo import PROGRAMS, is_compiled

KNOWN = (*PROGRAMS, "crun")


async def freeze(cli: Cli, cgroup: Cgroup | None, seconds: float) -> bool:
    """Stop all processes of `cgroup` and wait for it; return False where the runtime has to do that.

    Raises TimeoutError after `seconds`, 0 for never, with all of them running again.
    """
    if not _may_turn(cli, cgroup, frozen=False):
        return False
    assert cgroup is not None
    try:
        await to_the_end(partial(cgroup.freeze, timeout=seconds or math.inf))
    except (OSError, Refused):
        return False
    except FreezeTimedOut as error:
        raise TimeoutError(str(error)) from error
    return True


def thaw(cli: Cli, cgroup: Cgroup | None) -> bool:
    """Thaw all processes of `cgroup`; return False where the runtime has to do that."""
    if not _may_turn(cli, cgroup, frozen=True):
        return False
    assert cgroup is not None
    try:
        cgroup.thaw()
    except OSError:
        return False
    return True


def _may_turn(cli: Cli, cgroup: Cgroup | None, *, frozen: bool) -> bool:
    """Return whether the runtime would only switch the freezer of a container that is `frozen` or not."""
    try:
        return is_known(cli) and cgroup is not None and cgroup.frozen is frozen
    except OSError:
        return False  # not as we know it


def is_known(cli: Cli) -> bool:
    """Return whether the runtime is a compiled one whose handling of a container's cgroup and init is known.

    Raises OSError.
    """
    return cli.binary.name in KNOWN and is_compiled(cli.binary)
