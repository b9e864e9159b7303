"""Pages of files that are let go."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kybernate_shim.linux import file_pages
from kybernate_shim.linux.file_pages import let_go, unchanged

SMAPS = """\
1000-3000 r-xp 00000000 08:01 77                         /usr/bin/python3
Rss:                   8 kB
Anonymous:             0 kB
3000-4000 r--p 00002000 08:01 77                         /usr/bin/python3
Rss:                   4 kB
Anonymous:             4 kB
4000-5000 rw-p 00003000 08:01 77                         /usr/bin/python3
Anonymous:             0 kB
5000-6000 r--s 00000000 00:01 78                         /memfd:shared (deleted)
Anonymous:             0 kB
7000-8000 r--p 00000000 00:00 0                          [vvar]
Anonymous:             0 kB
8000-a000 r--p 00000000 08:01 79                         /usr/lib/a file
Anonymous:             0 kB
"""

SERVER = """
import sys
sys.path.insert(0, {root!r})
from kybernate_shim.linux.file_pages import let_go
def mapped():
    lines = [line.split() for line in open("/proc/self/smaps_rollup")]
    found = {{line[0]: int(line[1]) for line in lines[1:]}}
    return found["Rss:"] - found["Anonymous:"]
import json, argparse, decimal
before = mapped()
let_go()
print(before, mapped(), decimal.Decimal(json.loads("1")) + 1)
"""


def test_only_what_is_as_in_its_file_is_let_go() -> None:
    assert [mapping.split("-")[0] for mapping in unchanged(SMAPS)] == ["1000", "8000"]


def test_what_is_somewhere_else_by_now_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of this process at which another file was before."""
    with tempfile.TemporaryFile() as file:
        file.write(b"old" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_COPY) as copy:
            copy[:3] = b"new"
            inode = str(os.fstat(file.fileno()).st_ino)
            (mine,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[4] == inode)
            monkeypatch.setattr(file_pages, "_unchanged", {mine.replace("rw-p", "r--p")})
            let_go()
            assert copy[:3] == b"new"


def test_process_goes_on_without_the_pages_of_files() -> None:
    code = SERVER.format(root=str(Path(__file__).parents[3]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, sum_ = map(int, done.stdout.split())
    assert sum_ == 2
    assert after < before / 2
