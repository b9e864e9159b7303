"""Overlays against the real kernel: their layers, and options longer than a page."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kybernate_shim.linux.mount.mountinfo import below
from kybernate_shim.linux.mount.overlay import fits
from kybernate_shim.linux.mount.rootfs import Mount, MountFailed, kept_overlay, mount_rootfs, unmount_tree
from tests.contract.mounts import disk, flags, layers, overlay, root  # noqa: F401  # fixtures

pytestmark = pytest.mark.root


def test_overlay_shows_its_layers_and_takes_writes(disk: Path, root: Path) -> None:
    mount_rootfs([overlay(disk, layers(disk, ["a", "b"]))], root)
    assert (root / "in-all").read_text() == "0"
    (root / "in-all").write_text("new")
    assert (disk / "upper" / "in-all").read_text() == "new"
    assert (disk / "a" / "in-all").read_text() == "0"
    unmount_tree(root)
    assert list(root.iterdir()) == []


def test_overlay_can_be_kept_beyond_its_unmount(disk: Path, root: Path) -> None:
    mount_rootfs([overlay(disk, layers(disk, ["a"]))], root)
    kept = kept_overlay(root)
    assert kept is not None
    unmount_tree(root)
    assert list(root.iterdir()) == []
    try:
        inside = os.open("in-all", os.O_RDONLY | os.O_CLOEXEC, dir_fd=kept)
        assert os.read(inside, 2) == b"0"
        os.close(inside)
    finally:
        os.close(kept)


def test_what_is_no_overlay_is_not_kept(disk: Path, root: Path) -> None:
    assert kept_overlay(root) is None
    mount_rootfs([Mount("bind", str(disk), ["rbind"])], root)
    assert kept_overlay(root) is None
    unmount_tree(root)


def test_overlay_without_upper_directory_is_read_only(disk: Path, root: Path) -> None:
    a, b = layers(disk, ["a", "b"])
    mount_rootfs([Mount("overlay", "overlay", [f"lowerdir={a}:{b}"])], root)
    with pytest.raises(OSError, match="Read-only"):
        (root / "new").touch()
    unmount_tree(root)


@pytest.mark.parametrize(("count", "length"), [(64, 120), (120, 60)])
def test_more_layers_than_a_page_holds(disk: Path, root: Path, count: int, length: int) -> None:
    parent = "snapshots-" + "x" * length
    lower = layers(disk, [f"{parent}/{number}/fs" for number in range(count)])
    mount = overlay(disk, lower)
    assert not fits(mount.options)
    directory = Path.cwd()
    mount_rootfs([mount], root)
    assert Path.cwd() == directory
    assert [(root / f"only-in-{number}").read_text() for number in range(count)] == [str(n) for n in range(count)]
    assert (root / "in-all").read_text() == "0"
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append((root / "only-in-0").exists()))
    thread.start()
    thread.join()
    assert seen == [True], "the mount must be in the namespace of every thread"
    unmount_tree(root)


def test_layers_that_are_too_long_even_relative(disk: Path, root: Path) -> None:
    lower = layers(disk, [f"{number:03d}-{'y' * 150}/fs-{'z' * 60}" for number in range(40)])
    mount_rootfs([overlay(disk, lower, "nosuid", "noexec", "noatime")], root)
    assert [(root / f"only-in-{number}").read_text() for number in range(40)] == [str(n) for n in range(40)]
    assert flags(root) >= {"nosuid", "noexec", "noatime", "rw"}
    (root / "new").touch()
    assert (disk / "upper" / "new").exists()
    unmount_tree(root)


def test_too_long_layers_with_an_odd_name_and_read_only(disk: Path, root: Path) -> None:
    lower = layers(disk, [f"{number:03d}-{'y' * 200}" for number in range(30)])
    odd = layers(disk / "more", ["a:b"])[0]
    names = [str(path).replace(":", "\\:") for path in [*lower, odd]]
    mount_rootfs([Mount("overlay", "overlay", ["ro", "lowerdir=" + ":".join(names)])], root)
    assert flags(root) >= {"ro"}
    assert "ro" in below(root)[0].super_options
    assert (root / "only-in-29").read_text() == "29"
    unmount_tree(root)


def test_failure_layer_by_layer_says_why(disk: Path, root: Path) -> None:
    lower = [*layers(disk, [f"{number:03d}-{'y' * 200}" for number in range(30)]), disk / "missing"]
    with pytest.raises(MountFailed) as failed:
        mount_rootfs([overlay(disk, lower)], root)
    assert failed.value.errno == errno.ENOENT
    assert "missing" in str(failed.value)


def test_options_of_exactly_a_page_less_one_byte(disk: Path, root: Path) -> None:
    a, b = layers(disk, ["a", "b"])
    *rest, lowerdir = overlay(disk, [a, b]).options
    space = os.sysconf("SC_PAGE_SIZE") - 1 - len(",".join([*rest, lowerdir]))
    options = [*rest, lowerdir.replace(f":{b}", f":{'/' * space}{b}")]
    assert len(",".join(options)) == os.sysconf("SC_PAGE_SIZE") - 1
    assert fits(options)
    mount_rootfs([Mount("overlay", "overlay", options)], root)
    assert (root / "only-in-1").read_text() == "1"
    unmount_tree(root)


def test_five_hundred_layers(disk: Path, root: Path) -> None:
    lower = layers(disk, [f"snapshots/{number}/fs" for number in range(500)])
    mount_rootfs([overlay(disk, lower)], root)
    assert (root / "only-in-499").read_text() == "499"
    unmount_tree(root)
