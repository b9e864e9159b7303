"""What another user of the node can read, found out by reading as that user, not by looking at modes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NOBODY = 65534
LOOK = """
import json, os, sys
found = []
for path in json.load(sys.stdin):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        found.append(path)
    except OSError:
        pass
json.dump(found, sys.stdout)
"""


def readable(*places: Path) -> list[str]:
    """Return the files and directories in or below `places` that uid 65534 can open."""
    paths = [str(path) for place in places for path in [place, *sorted(place.rglob("*"))] if not path.is_symlink()]
    done = subprocess.run(
        [sys.executable, "-IS", "-c", LOOK],
        input=json.dumps(paths), capture_output=True, text=True, check=True,
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout)
    return found


@contextmanager
def entered(*paths: Path) -> Iterator[None]:
    """Let every user pass the directories above `paths`: only their own modes protect them then."""
    before = {parent: parent.stat().st_mode & 0o7777 for path in paths for parent in path.parents}
    with ExitStack() as undo:
        for parent, mode in before.items():
            undo.callback(parent.chmod, mode)
            parent.chmod(mode | 0o111)
        yield
