"""One descriptor watches many files, and says which of them was read."""

from __future__ import annotations

import os
from pathlib import Path

from kybernate_shim.linux import inotify


def test_reads_are_told_by_file(tmp_path: Path) -> None:
    fd = inotify.instance()
    watches = {}
    for name in "ab":
        (tmp_path / name).write_text("x")
        watches[name] = inotify.watch(fd, str(tmp_path / name), inotify.IN_ACCESS)
    assert list(inotify.happened(fd)) == []
    (tmp_path / "b").read_text()
    assert set(inotify.happened(fd)) == {watches["b"]}
    inotify.unwatch(fd, watches["b"])
    (tmp_path / "b").unlink()
    inotify.unwatch(fd, watches["b"])
    (tmp_path / "a").read_text()
    assert watches["a"] in set(inotify.happened(fd))
    os.close(fd)
