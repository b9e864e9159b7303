"""Finds the processes of a CUDA helper, to look at them and to kill them."""

from __future__ import annotations

from pathlib import Path

import psutil

PATIENCE = 30.0  # s for a call whose deadline is not the subject; the machine may be busy with other tests


def helpers(socket: Path) -> list[psutil.Process]:
    """Return the helper processes of `socket`, oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time", "status"]):
        arguments = process.info["cmdline"] or []
        if str(socket) in arguments and "kybernate_shim.cuda.helper" in arguments:
            found.append(process)
    return sorted(found, key=lambda process: process.info["create_time"])
