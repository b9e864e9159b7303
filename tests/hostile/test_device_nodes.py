"""Device nodes that a restore adds to a container's /dev, whose processes have put links to the host there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux.device_nodes import make_char_device
from tests.system.ctr import Ctr

DEVICE = os.makedev(1, 3)
NODE = "/dev/nvidia7"
ATTEMPTS = 300
# Puts a link to the file $0 in the place of whatever is made at $1, all the time.
SWAPPING = 'while :; do ln -sf "$0" /dev/link; mv -f /dev/link "$1"; rm -f "$1"; done'


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the host's that is root's own."""
    path = tmp_path / "victim"
    path.write_text("secret")
    path.chmod(0o600)
    yield path
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert path.read_text() == "secret"


def seen(pid: int, path: str) -> os.stat_result:
    """Return the status of what the container has at `path`."""
    return Path(f"/proc/{pid}/root{path}").lstat()


def test_device_is_made_for_everybody_in_the_containers_dev(ours: Ctr) -> None:
    with ours.running("sleep", "600") as id:
        pid = ours.pid(id)
        assert make_char_device(pid, NODE, DEVICE)
        found = seen(pid, NODE)
        assert (found.st_mode, found.st_rdev) == (stat.S_IFCHR | 0o666, DEVICE)
        assert not make_char_device(pid, NODE, DEVICE)


def test_link_in_the_place_of_a_device_is_left_alone(ours: Ctr, victim: Path) -> None:
    with ours.running("sleep", "600") as id:
        pid = ours.pid(id)
        ours.exec(id, "ln", "-s", str(victim), NODE)
        assert not make_char_device(pid, NODE, DEVICE)
        assert stat.S_ISLNK(seen(pid, NODE).st_mode)


def test_link_in_the_place_of_a_directory_is_refused(ours: Ctr, tmp_path: Path) -> None:
    with ours.running("sleep", "600") as id:
        ours.exec(id, "ln", "-s", str(tmp_path), "/dev/dir")
        with pytest.raises(OSError, match="link"):
            make_char_device(ours.pid(id), "/dev/dir/nvidia7", DEVICE)
    assert list(tmp_path.iterdir()) == []


def test_link_that_takes_the_place_of_a_new_device_is_not_followed(ours: Ctr, victim: Path) -> None:
    with ours.running("sh", "-c", SWAPPING, str(victim), NODE) as id:
        pid = ours.pid(id)
        outcomes = set()
        for _ in range(ATTEMPTS):
            try:
                outcomes.add(make_char_device(pid, NODE, DEVICE))
            except (OSError, FileNotFoundError):
                outcomes.add(False)
        assert outcomes == {True, False}  # it was first at times, and the other was


def test_volume_below_dev_gets_no_device(ours: Ctr, tmp_path: Path) -> None:
    mount = f"type=bind,src={tmp_path},dst=/dev/volume,options=rbind:rw"
    with ours.running("sleep", "600", flags=["--mount", mount]) as id, pytest.raises(OSError, match="mounted at /dev"):
        make_char_device(ours.pid(id), "/dev/volume/nvidia7", DEVICE)
    assert list(tmp_path.iterdir()) == []


def test_volume_in_the_place_of_dev_gets_no_device(ours: Ctr, tmp_path: Path) -> None:
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # the runtime wants it
    mount = f"type=bind,src={tmp_path},dst=/dev,options=rbind:rw"
    with ours.running("sleep", "600", flags=["--mount", mount]) as id:
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(OSError, match="own"):
            make_char_device(ours.pid(id), NODE, DEVICE)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
