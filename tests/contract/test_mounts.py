"""Mounts against the real kernel. Every test ends with the mounts and descriptors with which it began."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import below, read_mountinfo
from kybernate_shim.linux.mount.rootfs import Mount, MountFailed, mount_rootfs, unmount_tree
from tests.contract.mounts import disk, flags, layers, overlay, root  # noqa: F401  # fixtures

pytestmark = pytest.mark.root


# -- Bind mounts and propagation --------------------------------------------------------------------------------------


def test_read_only_bind_keeps_the_sources_attributes(disk: Path, root: Path) -> None:
    source = disk / "source"
    source.mkdir()
    syscalls.mount("t", str(source), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOATIME)
    mount_rootfs([Mount("bind", str(source), ["rbind", "ro"])], root)
    with pytest.raises(OSError, match="Read-only"):
        (root / "new").touch()
    (source / "new").touch()
    assert (root / "new").exists()
    assert flags(root) >= {"ro", "nosuid", "nodev", "noatime"}
    unmount_tree(root)
    unmount_tree(source)


def test_bind_takes_attributes_without_ro(disk: Path, root: Path) -> None:
    mount_rootfs([Mount("bind", str(disk), ["bind", "nosuid", "noexec", "rw"])], root)
    assert flags(root) >= {"nosuid", "noexec", "rw"}
    unmount_tree(root)


def test_recursive_bind_shows_inner_mounts_and_loses_them_all(disk: Path, root: Path) -> None:
    source = disk / "source"
    (source / "inner").mkdir(parents=True)
    syscalls.mount("t", str(source / "inner"), "tmpfs")
    (source / "inner" / "file").touch()
    mount_rootfs([Mount("bind", str(source), ["rbind", "rprivate"])], root)
    assert (root / "inner" / "file").exists()
    unmount_tree(root)
    assert (source / "inner" / "file").exists()
    unmount_tree(source)


@pytest.mark.parametrize(
    ("word", "shown"), [("shared", "shared:"), ("rshared", "shared:"), ("unbindable", "unbindable"), ("private", "")]
)
def test_propagation_is_set(disk: Path, root: Path, word: str, shown: str) -> None:
    mount_rootfs([Mount("tmpfs", "tmpfs", ["size=1m", word])], root)
    assert [entry[: len(shown)] for entry in below(root)[0].propagation] == ([shown] if shown else [])
    unmount_tree(root)


def test_slave_receives_but_does_not_send(disk: Path, root: Path) -> None:
    source = disk / "source"
    (source / "a").mkdir(parents=True)
    (source / "b").mkdir()
    syscalls.mount(str(source), str(source), "", syscalls.MS_BIND)
    syscalls.mount("", str(source), "", syscalls.MS_SHARED)
    mount_rootfs([Mount("bind", str(source), ["bind", "rslave"])], root)
    syscalls.mount("t", str(source / "a"), "tmpfs")
    assert root / "a" in [mount.path for mount in read_mountinfo()]
    syscalls.mount("t", str(root / "b"), "tmpfs")
    assert source / "b" not in [mount.path for mount in read_mountinfo()]
    unmount_tree(root)
    unmount_tree(source)


# -- Order, places, failures ------------------------------------------------------------------------------------------


def test_mounts_are_done_in_order_and_at_their_places(disk: Path) -> None:
    root = disk / "made"
    (disk / "source" / "data").mkdir(parents=True)
    mounts = [Mount("bind", str(disk / "source"), ["bind"]), Mount("tmpfs", "tmpfs", ["size=1m"], "/data")]
    mount_rootfs(mounts, root)
    (root / "data" / "file").touch()
    assert not (disk / "source" / "data" / "file").exists()
    unmount_tree(root)


def test_symlink_from_the_image_does_not_lead_out_of_the_root(disk: Path) -> None:
    root = disk / "made"
    (disk / "source" / "etc").mkdir(parents=True)
    (disk / "source" / "link").symlink_to("/etc")
    (disk / "source" / "up").symlink_to("../../../../etc")
    for name in ("link", "up"):
        mounts = [Mount("bind", str(disk / "source"), ["bind"]), Mount("tmpfs", "tmpfs", [], name)]
        mount_rootfs(mounts, root)
        assert {mount.path for mount in below(root)} == {root, root / "etc"}
        assert not below(Path("/etc"))
        unmount_tree(root)


def test_failure_undoes_what_came_before_it_and_names_everything(disk: Path, root: Path) -> None:
    mounts = [
        Mount("tmpfs", "first", ["size=1m"]),
        Mount("bind", str(disk / "missing"), ["bind", "ro"]),
    ]
    with pytest.raises(MountFailed) as failed:
        mount_rootfs(mounts, root)
    assert failed.value.errno == errno.ENOENT
    for part in ("bind", str(disk / "missing"), str(root), "'bind,ro'", "0x1001", "No such file or directory"):
        assert part in str(failed.value)


def test_failure_after_the_mount_itself_undoes_it(disk: Path, root: Path) -> None:
    with pytest.raises(MountFailed):
        mount_rootfs([Mount("tmpfs", "t", ["uidmap=0:0:1", "gidmap=zero", "size=1m"])], root)
    with pytest.raises(MountFailed):
        mount_rootfs([Mount("proc", "proc", ["uidmap=0:7:1", "gidmap=0:7:1"])], root)  # procfs cannot be translated


@pytest.mark.parametrize(
    ("mount", "number"),
    [
        (Mount("nosuchfs", "none"), errno.ENODEV),
        (Mount("tmpfs", "tmpfs", ["nonsense=1"]), errno.EINVAL),
        (Mount("tmpfs", "tmpfs", ["mpol=" + "x" * 5000]), errno.E2BIG),
        (Mount("ext4", "/no/such/image", ["loop"]), errno.ENOENT),
        (Mount("tmpfs", "tmpfs", [], "no/such/place"), errno.ENOENT),
        (Mount("fuse.sshfs", "host:/"), errno.ENOSYS),
    ],
)
def test_refused_mount_has_the_kernels_reason(disk: Path, root: Path, mount: Mount, number: int) -> None:
    with pytest.raises(MountFailed) as failed:
        mount_rootfs([mount], root)
    assert failed.value.errno == number
    assert os.strerror(number) in str(failed.value) or number in (errno.E2BIG, errno.ENOSYS)
    assert len(str(failed.value)) < 2000


def test_fuse_helper_gets_the_mount_as_arguments(disk: Path, root: Path) -> None:
    calls: list[list[str]] = []
    mount = Mount("fuse3.fuse-overlayfs", "overlay", ["lowerdir=/a", "ro"])
    mount_rootfs([mount], root, run=lambda argv: calls.append(list(argv)))
    options = ["-o", "lowerdir=/a", "-o", "ro"]
    assert calls == [["mount.fuse3", "overlay", str(root), *options, "-t", "fuse-overlayfs"]]


# -- Loop devices -----------------------------------------------------------------------------------------------------


def attached_to(image: Path) -> list[Path]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [path for path in files if path.read_text().strip() == str(image)]


@pytest.fixture
def _loop_devices() -> Iterator[None]:
    """A node inside a container has a /dev of its own, where the kernel's loop devices do not appear by themselves."""
    wanted = {Path("/dev/loop-control"): (stat.S_IFCHR, os.makedev(10, 237))}
    wanted |= {Path(f"/dev/loop{number}"): (stat.S_IFBLK, os.makedev(7, number)) for number in range(32)}
    made = [path for path in wanted if not path.exists()]
    for path in made:
        kind, device = wanted[path]
        os.mknod(path, kind | 0o600, device)
    yield
    for path in made:
        path.unlink()


@pytest.mark.usefixtures("_loop_devices")
@pytest.mark.parametrize("options", [["loop"], ["loop", "ro"]])
def test_loop_device_lives_as_long_as_its_mount(disk: Path, root: Path, options: list[str]) -> None:
    image = disk / "image"
    (disk / "content").mkdir()
    (disk / "content" / "hello").write_text("from the image")
    with image.open("wb") as file:
        file.truncate(4 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-d", disk / "content", image], check=True, stdin=subprocess.DEVNULL)
    mount_rootfs([Mount("ext4", str(image), options)], root)
    assert (root / "hello").read_text() == "from the image"
    assert ("ro" in flags(root)) == ("ro" in options)
    assert len(attached_to(image)) == 1
    unmount_tree(root)
    assert attached_to(image) == []


@pytest.mark.usefixtures("_loop_devices")
def test_image_that_cannot_be_mounted_leaves_no_loop_device(disk: Path, root: Path) -> None:
    image = disk / "image"
    image.write_bytes(bytes(1 << 20))
    with pytest.raises(MountFailed):
        mount_rootfs([Mount("ext4", str(image), ["loop", "ro"])], root)
    assert attached_to(image) == []


# -- Translated owners ------------------------------------------------------------------------------------------------


def test_bind_with_id_maps_shows_other_owners(disk: Path, root: Path) -> None:
    (disk / "source").mkdir()
    (disk / "source" / "file").touch()
    os.chown(disk / "source" / "file", 3, 4)
    words = ["rbind", "ro", "uidmap=0:100000:65536", "gidmap=0:200000:65536"]
    mount_rootfs([Mount("bind", str(disk / "source"), words)], root)
    assert ((root / "file").stat().st_uid, (root / "file").stat().st_gid) == (100003, 200004)
    assert flags(root) >= {"ro", "idmapped"}
    assert len(below(root)) == 1
    unmount_tree(root)


def test_overlay_with_id_maps_translates_its_layers(disk: Path, root: Path) -> None:
    lower = layers(disk, ["a", "b"])
    os.chown(lower[1] / "only-in-1", 5, 6)
    mount_rootfs([overlay(disk, lower, "uidmap=0:1000:10", "gidmap=0:2000:10")], root)
    assert ((root / "only-in-1").stat().st_uid, (root / "only-in-1").stat().st_gid) == (1005, 2006)
    assert (root / "only-in-0").stat().st_uid == 1000
    unmount_tree(root)


# -- Unmounting -------------------------------------------------------------------------------------------------------


def test_unmounting_nothing_is_no_error(disk: Path, root: Path) -> None:
    unmount_tree(root)
    unmount_tree(disk / "never" / "there")


def test_stacked_and_nested_mounts_all_go(disk: Path, root: Path) -> None:
    for _ in range(3):
        syscalls.mount("stack", str(root), "tmpfs")
    (root / "a b\tc\\d").mkdir()
    syscalls.mount("inner", str(root / "a b\tc\\d"), "tmpfs")
    (root / "a b\tc\\d" / "deeper").mkdir()
    syscalls.mount("deeper", str(root / "a b\tc\\d" / "deeper"), "tmpfs")
    neighbour = disk / "rootfs-2"
    neighbour.mkdir()
    syscalls.mount("neighbour", str(neighbour), "tmpfs")
    unmount_tree(root)
    assert [mount.path for mount in below(neighbour)] == [neighbour]
    unmount_tree(neighbour)


def test_busy_tree_names_its_mounts_and_users_then_goes(disk: Path, root: Path) -> None:
    mount_rootfs([Mount("tmpfs", "busy-one", [])], root)
    with subprocess.Popen(["cat"], cwd=root, stdin=subprocess.PIPE) as user:
        with pytest.raises(MountFailed, match="cannot unmount") as failed:
            unmount_tree(root, attempts=3, pause=0.01)
        assert failed.value.errno == errno.EBUSY
        for part in (str(root), "tmpfs busy-one", f"cat[{user.pid}]"):
            assert part in str(failed.value)
        user.communicate()
    unmount_tree(root)


def test_busy_tree_is_tried_again_until_its_user_leaves(disk: Path, root: Path) -> None:
    mount_rootfs([Mount("tmpfs", "tmpfs", [])], root)
    with subprocess.Popen(["sleep", "0.3"], cwd=root):
        unmount_tree(root)
    assert below(root) == []
