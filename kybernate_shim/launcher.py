"""`python -m kybernate_shim.launcher DIRECTORY` writes containerd-shim-kybernate-v1 there, as it starts fastest.

That is the compiled client of the fork server, with the paths of this installation's interpreter and packages in it. It
is one file that may be copied anywhere. Where nothing could be compiled, it is a script, which does all work itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kybernate_shim.errors import Refused
from kybernate_shim.fork_server.place import DIRECTORY
from kybernate_shim.fork_server.place import PROGRAM as NAME
from kybernate_shim.linux.atomic_write import replace_file
from kybernate_shim.native import CLIENT, PACKAGE

PATH_BYTES = 4096  # of each of the client's values
LONGEST_FIRST_LINE = 127  # of older kernels
SCRIPT = """#!{interpreter} -IS
import sys
sys.path.append({packages!r})
sys.argv.insert(1, "its client was not compiled")
from kybernate_shim.__main__ import run_launched
run_launched()
"""


def program(interpreter: str, packages: Path, client: Path | None = None, directory: str = DIRECTORY) -> bytes:
    """Return the program's content: a compiled client, or a script without one. Raises Refused."""
    if client is None:
        return _script(interpreter, packages)
    content = client.read_bytes()
    for name, value in {"interpreter": interpreter, "packages": str(packages), "directory": directory}.items():
        place = f"@{name}@".encode().ljust(PATH_BYTES, b"\0")
        if content.count(place) != 1 or len(os.fsencode(value)) >= PATH_BYTES:
            raise Refused(f"{client} has no place for {value} as its {name}")
        content = content.replace(place, os.fsencode(value).ljust(PATH_BYTES, b"\0"))
    return content


def _script(interpreter: str, packages: Path) -> bytes:
    text = SCRIPT.format(interpreter=interpreter, packages=str(packages))
    if len(text.partition("\n")[0]) > LONGEST_FIRST_LINE or " " in interpreter:
        raise Refused(f"a script cannot begin with `#!{interpreter} -IS`: too long, or with a space in it")
    return text.encode()


def current() -> bytes:
    """Return the content of the program of this installation. Raises OSError and Refused."""
    client = CLIENT.of() if CLIENT.of().exists() else None
    return program(sys.executable, PACKAGE.resolve().parent, client)


def is_current(directory: Path) -> bool:
    """Return whether the program is in `directory` as `write` would write it. Raises OSError, Refused."""
    place = directory / NAME
    return place.is_file() and os.access(place, os.X_OK) and place.read_bytes() == current()


def write(directory: Path) -> bool:
    """Write the program into `directory`; a process that executes it during the write gets the old or the new.

    Returns whether it is the compiled one. Raises OSError and Refused.
    """
    content = current()
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / NAME, content, mode=0o755)
    return CLIENT.of().exists()


def main() -> int:
    """Serve the command line. With --check, the exit status is 1 where the program is not there as it would be."""
    check, words = "--check" in sys.argv[1:], [word for word in sys.argv[1:] if word != "--check"]
    if len(words) != 1:
        sys.stderr.write("usage: python -m kybernate_shim.launcher [--check] DIRECTORY\n")
        return 2
    try:
        if check:
            return 0 if is_current(Path(words[0])) else 1
        if not write(Path(words[0])):
            sys.stderr.write("kybernate_shim.launcher: the client is not compiled, so containers start slowly; install "
                             "a C compiler, then this package again\n")  # fmt: skip
    except (OSError, Refused) as error:
        sys.stderr.write(f"kybernate_shim.launcher: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
