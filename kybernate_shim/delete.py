"""`delete`: remove what a container left behind, without its daemon.

containerd calls it after every container, mostly when all is gone already, and after a daemon has died, when nothing
is. It must be idempotent and quick, and stdout carries the answer alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from kybernate_shim.invocation import Invocation

KILLED = 137
RUNTIME_SECONDS = 4.0  # containerd gives the whole of `delete` five


def delete(invocation: Invocation) -> int:
    """Remove the container from its runtime, unmount its rootfs and print a DeleteResponse.

    Exits with 1, and with the reason on stderr, when something is left: containerd then keeps the bundle.
    """
    from kybernate_shim.linux.mounts import MountFailed, unmount_tree
    from kybernate_shim.oci.bundle import Bundle

    bundle = Bundle(Path(invocation.bundle or Path.cwd().parent / invocation.id))
    pid = bundle.init_pid_or_zero()
    problems = _remove_from_runtime(invocation, bundle)
    try:
        unmount_tree(bundle.rootfs)
    except (OSError, MountFailed) as error:
        problems.append(str(error))
    sys.stdout.buffer.write(answer(pid, time.time_ns()))
    for problem in problems:
        sys.stderr.write(f"containerd-shim-kybernate-v1: delete {invocation.id}: {problem}\n")
    return 1 if problems else 0
