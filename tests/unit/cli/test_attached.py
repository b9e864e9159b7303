"""FIFOs of a container in the foreground."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kybernate.node.stdio import TaskStreams, attached, into_log


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


def test_output_is_copied_to_its_end(tmp_path: Path) -> None:
    out, into_out = os.pipe()
    err, into_err = os.pipe()
    big = b"x" * (3 << 20)  # far more than pipes hold
    content: dict[str, bytes] = {}
    reader = threading.Thread(target=lambda: content.update(out=read_all(out)))
    reader.start()
    with attached(into_out, into_err, directory=tmp_path) as stdio:
        for path, data in ((stdio.stdout, b"one\n"), (stdio.stdout, big), (stdio.stderr, b"two\n")):
            Path(path).write_bytes(data)  # opens and closes it each time: that is not the end yet
    os.close(into_out)
    os.close(into_err)
    reader.join(10)
    assert content["out"] == b"one\n" + big
    assert read_all(err) == b"two\n"
    assert list(tmp_path.iterdir()) == []


def test_terminal_has_one_stream(tmp_path: Path) -> None:
    with attached(1, 2, terminal=True, directory=tmp_path) as stdio:
        assert stdio.stdout
        assert stdio.stderr == ""
        assert stdio.terminal


def test_log_takes_both_streams(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    assert into_log(tmp_path / "log") == TaskStreams(stdout=uri, stderr=uri)
    assert into_log(None) == TaskStreams()
