"""`python -m kybernate_shim.launcher DIRECTORY` writes containerd-shim-kybernate-v1 there, as it starts fastest.

The script that pip makes starts the interpreter with all of site's work, which takes as long as the rest of a `start`.
This one tells it not to, and where this installation's packages are. It is one file that may be copied anywhere.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import kybernate_shim

NAME = "containerd-shim-kybernate-v1"
LONGEST_FIRST_LINE = 127  # of older kernels
SCRIPT = """#!{interpreter} -IS
import sys
sys.path.append({packages!r})
from kybernate_shim.__main__ import launch
launch()
"""


class InterpreterUnusable(Exception):
    """The interpreter's path cannot stand in a script's first line."""


def script(interpreter: str, packages: Path) -> str:
    """Return the program's text. Raises InterpreterUnusable."""
    text = SCRIPT.format(interpreter=interpreter, packages=str(packages))
    if len(text.partition("\n")[0]) > LONGEST_FIRST_LINE or " " in interpreter:
        raise InterpreterUnusable(f"a script cannot begin with `#!{interpreter} -IS`: too long, or with a space in it")
    return text


def write(directory: Path) -> None:
    """Write the program into `directory`; whoever executes it meanwhile gets the old or the new."""
    text = script(sys.executable, Path(kybernate_shim.__file__).resolve().parents[1])
    directory.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=directory, prefix=f".{NAME}.")
    with os.fdopen(fd, "w") as stream:
        stream.write(text)
        os.fchmod(fd, 0o755)
    Path(temporary).replace(directory / NAME)


def main() -> int:
    """Serve the command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m kybernate_shim.launcher DIRECTORY\n")
        return 2
    try:
        write(Path(sys.argv[1]))
    except (OSError, InterpreterUnusable) as error:
        sys.stderr.write(f"kybernate_shim.launcher: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
