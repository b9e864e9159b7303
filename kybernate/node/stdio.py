"""Output of a container that runs in the foreground: FIFOs that the shim writes to, copied to our own output.

containerd's clients own the FIFOs, and the shim opens them by name.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FIFOS = Path("/run/containerd/fifo")
CHUNK = 64 << 10
LAST_OUTPUT_SECONDS = 5.0


@dataclass(frozen=True)
class TaskStreams:
    """Where a task's streams go, as containerd writes it: paths of FIFOs, URIs, or empty for /dev/null."""

    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    terminal: bool = False


def into_log(log: Path | None, *, terminal: bool = False) -> TaskStreams:
    """Return streams for a container in the background: a file that is appended to, or nothing."""
    uri = f"file://{log.absolute()}" if log else ""
    return TaskStreams(stdout=uri, stderr="" if terminal else uri, terminal=terminal)


@contextmanager
def attached(
    stdout: int, stderr: int, *, terminal: bool = False, directory: Path | None = None
) -> Iterator[TaskStreams]:
    """Make FIFOs and copy what comes out of them to the two descriptors, until the block ends.

    They are made below `directory`, by default where containerd's clients have theirs. A terminal has one stream. At
    the end the copies continue until the shim has closed its ends, 5 seconds at most.
    """
    directory = directory or FIFOS
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="kybernate-", dir=directory))
    targets = {"stdout": stdout} if terminal else {"stdout": stdout, "stderr": stderr}
    copies = []
    try:
        copies = [_Copy(home / name, target) for name, target in targets.items()]
        yield TaskStreams(**{name: str(home / name) for name in targets}, terminal=terminal)
    finally:
        for copy in copies:
            copy.finish()
        shutil.rmtree(home, ignore_errors=True)


class _Copy:
    """One FIFO and the thread that empties it.

    The end of the stream is when the shim has closed it, not a moment when it has not opened it yet: a write end of our
    own keeps the stream open until `finish`.
    """

    def __init__(self, path: Path, target: int) -> None:
        os.mkfifo(path, 0o600)
        self._target = target
        self._source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._hold = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.set_blocking(self._source, True)
        self._thread = threading.Thread(target=self._run, name=f"copy {path.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while data := os.read(self._source, CHUNK):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._target, view) :]
        except OSError:
            pass  # the reader of our output has gone; the container then gets EPIPE, as with any pipe
        finally:
            os.close(self._source)

    def finish(self) -> None:
        os.close(self._hold)
        self._thread.join(LAST_OUTPUT_SECONDS)
