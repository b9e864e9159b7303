"""Python packages of the kit for the program itself, on a machine that lacks them. Imports nothing but the library."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

WHEELS = Path(__file__).resolve().parents[2] / "build/gpu-kit/wheels"
NEEDED = ("msgspec", "google.protobuf")


def make_importable(*needed: str) -> str:
    """Unpack the kit's wheels where a package is missing, and return where, "" where none is.

    The kit's come before the machine's, as in the programs of the node: generated code refuses older versions. The
    environment of other programs stays as it is.
    """
    site = ""
    if WHEELS.is_dir() and not all(map(_is_there, (*NEEDED, *needed))):
        site = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, site, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", site, *sorted(WHEELS.glob("*.whl"))], check=True)
        sys.path.insert(1, site)  # after the checkout
    return site


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package above it
        return False
