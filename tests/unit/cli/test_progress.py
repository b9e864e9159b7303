"""A bar is drawn on a terminal alone; what draws it is not loaded anywhere else."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

PROGRAM = """
import sys
from kybernate.cli.progress import Bar
from kybernate_shim.messages.shim_pb2 import Container
with Bar("suspend trainer") as bar:
    bar.show(Container(step="arena-take", done_bytes=1 << 20, total_bytes=4 << 20))
    bar.count(2 << 20, 4 << 20)
print("rich" in sys.modules)
"""


def test_nothing_is_drawn_where_stderr_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_terminal_shows_the_operation_and_its_step() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as it:
        os.close(theirs)
        assert it.communicate(timeout=60)[0] == b"True\n"
    drawn, until = b"", time.monotonic() + 10
    while b"arena-take" not in drawn and time.monotonic() < until and select.select([ours], [], [], 1)[0]:
        drawn += os.read(ours, 65536)
    os.close(ours)
    assert b"suspend trainer: arena-take" in drawn
