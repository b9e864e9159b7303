"""What the machine itself must have before a lane can be built, and how it gets it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from tests.lab.failure import LabFailed, check

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def provide_tools() -> None:
    """Install what building needs and this machine lacks, with apt-get."""
    present = {
        "mmdebstrap": shutil.which("mmdebstrap") is not None,
        "python3-venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        "debian-archive-keyring": KEYRING.exists(),
    }
    missing = [package for package, there in present.items() if not there]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise LabFailed(f"building needs {', '.join(missing)}, and only apt-get is known here as a way to get it")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    check(["apt-get", "update", "-qq"], env=quiet)
    check(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing], env=quiet)
