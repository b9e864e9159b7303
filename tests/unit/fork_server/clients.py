"""The program that containerd executes, in installations of their own, where a pretended interpreter's work is seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kybernate_shim import launcher
from kybernate_shim.native import CLIENT, build

# What the client lets an interpreter do; by what these print, a test sees that no other process has done the call.
PROGRAM = """
import sys
from pathlib import Path

def run_launched():
    print("itself:", sys.argv.pop(1), "|", *sys.argv[1:])
    sys.exit(77)

def leave_server():
    Path(__file__).with_name("left").touch()
"""
ITSELF = 77


def package_in(root: Path) -> Path:
    """Make a package whose program only reports that it was reached."""
    package = root / "kybernate_shim"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM)
    return package


class Client:
    """A program in `folder`, of an installation in `root`, whose fork server would listen in `directory`."""

    def __init__(self, folder: Path, root: Path, directory: Path, *flags: str) -> None:
        compiled = build(CLIENT, folder, *flags)
        self.path = folder / launcher.NAME
        self.path.write_bytes(launcher.program(sys.executable, root, compiled, str(directory)))
        self.path.chmod(0o755)
        self.left = root / "kybernate_shim/left"

    def ask(self, argv: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Execute it as containerd does."""
        return subprocess.run([self.path, *argv], capture_output=True, text=True, check=False, timeout=30, **how)
