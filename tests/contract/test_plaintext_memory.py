"""The memory for plain files of encrypted images, on the real kernel: root's alone, and gone whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.image import plaintext_memory as module
from kybernate_shim.checkpoint.image.plaintext_memory import ROOT, memory_for_plaintext, remove_stale, require_memory
from kybernate_shim.errors import NoRoom, Refused
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import MountPoint, read_mountinfo
from kybernate_shim.linux.private_files import make_directory

HOLDS = """
import sys, time
from kybernate_shim.checkpoint.image.plaintext_memory import memory_for_plaintext
with memory_for_plaintext("killed") as directory:
    (directory / "pages-1.img").write_bytes(b"secret")
    print(directory, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert not ROOT.exists()
    assert not mounts()


def mounts() -> list[MountPoint]:
    return [mount for mount in read_mountinfo() if mount.path.is_relative_to(ROOT)]


def killed() -> Path:
    """Return the directory of a process that was killed while it used it."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        process.send_signal(signal.SIGKILL)
    return directory


def test_parents_that_were_missing_are_roots_own_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first daemon of a node may find no state directory at all."""
    monkeypatch.setattr(module, "ROOT", tmp_path / "state" / "plain")
    before = os.umask(0o022)
    try:
        with memory_for_plaintext("first"):
            assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_directory_is_roots_own_memory_that_is_not_swapped() -> None:
    with memory_for_plaintext("mine") as directory:
        (mount,) = mounts()
        assert (mount.path, mount.type) == (directory, "tmpfs")
        assert {"nosuid", "nodev", "noexec"} <= set(mount.options)
        assert all(path.stat().st_mode & 0o777 == 0o700 and path.stat().st_uid == 0 for path in (ROOT, directory))
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 4):
            assert "noswap" in mount.super_options
        done = subprocess.run(["ls", directory], user=65534, group=65534, capture_output=True, check=False)
        assert done.returncode


def test_it_is_removed_after_a_failure_with_files_open() -> None:
    opened: list[Any] = []

    def fail_inside() -> None:
        with memory_for_plaintext("mine") as directory:
            (directory / "pages-1.img").write_bytes(b"secret")
            opened.append((directory / "pages-1.img").open("rb"))
            opened.append(os.open(directory, os.O_PATH))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not ROOT.exists()
    opened[0].close()
    os.close(opened[1])


def test_copy_of_the_mount_in_another_namespace_holds_no_files() -> None:
    with memory_for_plaintext("mine") as directory:
        (directory / "pages-1.img").write_bytes(b"secret")
        script = f"echo ready; read go; ls {directory}"
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    assert other.communicate("go\n")[0] == ""


def test_what_a_killed_process_has_left_is_removed_by_the_next() -> None:
    directory = killed()
    assert (directory / "pages-1.img").read_bytes() == b"secret"
    with memory_for_plaintext("next") as other:
        assert not directory.exists()
        assert [mount.path for mount in mounts()] == [other]
        remove_stale()  # what is in use stays
        assert other.exists()


def test_what_a_killed_process_has_left_is_removed_by_delete() -> None:
    killed()
    remove_stale()


def test_reused_pid_is_not_taken_for_the_process_that_has_ended() -> None:
    make_directory(ROOT / f"old.{os.getpid()}.1")
    remove_stale()


def test_kernel_that_would_swap_is_refused_where_there_is_swap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mount, swaps = syscalls.mount, tmp_path / "swaps"

    def old(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
        if "noswap" in data:
            raise OSError(22, "Invalid argument")
        mount(source, target, fstype, flags, data)

    monkeypatch.setattr(syscalls, "mount", old)
    monkeypatch.setattr(module, "SWAPS", swaps)
    header = "Filename\tType\tSize\tUsed\tPriority\n"
    swaps.write_text(f"{header}/dev/sda2 partition 100 0 -2\n")
    with pytest.raises(Refused, match="/dev/sda2"), memory_for_plaintext("mine"):
        pass
    swaps.write_text(f"{header}/dev/zram0 partition 100 0 -2\n")
    with memory_for_plaintext("mine") as directory:
        assert directory.is_dir()


def test_memory_that_is_lacking_is_named() -> None:
    with pytest.raises(NoRoom, match="the restore of x needs about 1073741824 MiB"):
        require_memory(1 << 50, "the restore of x")
    require_memory(0, "the restore of x")
