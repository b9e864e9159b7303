"""A disk of its own for tests that mount, which ends with the mounts and descriptors with which it began."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import below
from kybernate_shim.linux.mount.rootfs import Mount


def descriptors() -> dict[str, str]:
    """Return this process's descriptors, each with what it is open for."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):  # that of the list itself
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A private tmpfs, because an upper directory cannot be on an overlay, which a lab's root may be."""
    before, temporary = descriptors(), set(Path(tempfile.gettempdir()).glob("kybernate-idmap-*"))
    syscalls.mount("disk", str(tmp_path), "tmpfs")
    syscalls.mount("", str(tmp_path), "", syscalls.MS_PRIVATE)
    try:
        yield tmp_path
        left = [str(mount.path) for mount in below(tmp_path)]
        assert left == [str(tmp_path)], "mounts are left over"
        assert (now := descriptors()) == before, f"descriptors are left over: {set(now.items()) ^ set(before.items())}"
        assert set(Path(tempfile.gettempdir()).glob("kybernate-idmap-*")) == temporary
    finally:
        for mount in below(tmp_path):
            syscalls.umount(str(mount.path), syscalls.MNT_DETACH)


@pytest.fixture
def root(disk: Path) -> Path:
    (disk / "rootfs").mkdir()
    return disk / "rootfs"


def layers(disk: Path, names: Sequence[str]) -> list[Path]:
    """Make layer directories; each holds a file of its own name and one that they all have."""
    paths = [disk / name for name in names]
    for number, path in enumerate(paths):
        path.mkdir(parents=True)
        (path / f"only-in-{number}").write_text(str(number))
        (path / "in-all").write_text(str(number))
    return paths


def overlay(disk: Path, lower: Sequence[Path], *options: str) -> Mount:
    for name in ("upper", "work"):
        (disk / name).mkdir(exist_ok=True)
    lowerdir = "lowerdir=" + ":".join(map(str, lower))
    upper = [f"workdir={disk}/work", f"upperdir={disk}/upper"]
    return Mount("overlay", "overlay", ["index=off", *upper, lowerdir, *options])


def flags(path: Path) -> set[str]:
    return set(below(path)[-1].options)
