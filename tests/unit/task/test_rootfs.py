"""A container's root filesystem is unmounted without waiting for what the kernel writes out then."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from kybernate_shim.linux.children import Children
from kybernate_shim.linux.mount.rootfs import MountFailed
from kybernate_shim.task import rootfs as subject
from kybernate_shim.task.rootfs import Rootfs


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> int:
    """A descriptor that stands for a filesystem."""
    fd = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr(subject, "kept_overlay", lambda path: fd)
    return fd


def test_unmount_does_not_wait_until_the_filesystem_is_written_out(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, released = threading.Event(), threading.Event()
    unmounted: list[Path] = []

    def release(fd: int) -> None:
        assert unmounted
        written.wait(10)
        os.close(fd)
        released.set()

    monkeypatch.setattr(subject, "_release", release)
    monkeypatch.setattr(subject, "unmount_tree", unmounted.append)
    asyncio.run(Rootfs(tmp_path, Children()).unmount())
    assert unmounted == [tmp_path]
    assert not released.is_set()
    written.set()
    assert released.wait(10)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)


def test_filesystem_that_is_still_in_use_is_not_kept(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(subject, "_release", lambda fd: (os.close(fd), released.set()))

    def busy(path: Path) -> None:
        raise MountFailed(16, f"cannot unmount {path}")

    monkeypatch.setattr(subject, "unmount_tree", busy)
    with pytest.raises(MountFailed):
        asyncio.run(Rootfs(tmp_path, Children()).unmount())
    assert released.wait(10)
