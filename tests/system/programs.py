"""Programs that stand in for a node's own, to fail or to hang."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

# The node's CRIU, by its full path: what stands in for it is the first of that name in PATH.
CRIU = shutil.which("criu") or "criu"


def script(path: Path, text: str) -> Path:
    """Write a shell script that can be executed, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
