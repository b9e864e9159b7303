"""Changes of a real overlay, written as a diff and applied to a fresh one: the two look the same in the end."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate_shim.checkpoint.rootfs.apply import apply_diff
from kybernate_shim.checkpoint.rootfs.diff import NAME, Diff, write_diff
from kybernate_shim.checkpoint.rootfs.overlay import find_overlay
from kybernate_shim.errors import Refused
from kybernate_shim.linux.mount import syscalls
from kybernate_shim.linux.mount.mountinfo import below

pytestmark = pytest.mark.root

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service, as setcap writes it


class Layers:
    """Two overlays over the same image, below `base`: one is changed, the other gets the changes."""

    def __init__(self, base: Path, options: str = "") -> None:
        self.base, self.options = base, options
        self.image = base / "image, with a comma"
        self.image.mkdir()

    def mount(self, name: str) -> Path:
        upper, work, root = (self.base / f"{name}-{part}, x" for part in ("upper", "work", "root"))
        for path in (upper, work, root):
            path.mkdir()
        lower, up, down = (str(path).replace(",", "\\,") for path in (self.image, upper, work))
        data = f"lowerdir={lower},upperdir={up},workdir={down}{self.options}"
        syscalls.mount("overlay", str(root), "overlay", 0, data)
        return root

    def unmount(self) -> None:
        for mount in below(self.base):
            syscalls.umount(str(mount.path))


@contextmanager
def layers(options: str = "") -> Iterator[Layers]:
    # On a disk's filesystem if there is one: tmpfs has no user attributes before Linux 6.6.
    with TemporaryDirectory(dir="/var/tmp") as base:
        made = Layers(Path(base), options)
        try:
            yield made
        finally:
            made.unmount()


@pytest.fixture
def overlay() -> Iterator[Layers]:
    with layers() as made:
        yield made


def facts(root: Path) -> dict[str, Any]:
    """Return everything about a tree that a process in it could notice."""
    paths = [root, *sorted(root.rglob("*"))]
    first: dict[int, str] = {}
    found = {}
    for path in paths:
        name = str(path.relative_to(root))
        status = path.lstat()
        content: object = None
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes() if status.st_size < 1 << 20 else status.st_size
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        found[name] = (
            oct(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            status.st_rdev,
            content,
            {key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)},
            first.setdefault(status.st_ino, name) if not path.is_dir() else "",
        )
    return found


def carried_over(
    made: Layers, change: Callable[[Path], object], exclude: tuple[str, ...] = ()
) -> tuple[Path, Path, Diff]:
    """Change one overlay, carry its diff to another one; return both roots and what was written."""
    changed = made.mount("changed")
    change(changed)
    diff = write_diff(find_overlay(changed), made.base / NAME, exclude=exclude)
    fresh = made.mount("fresh")
    apply_diff(made.base / NAME, fresh)
    return changed, fresh, diff


def test_every_kind_of_change_comes_back(overlay: Layers) -> None:
    for name in ("etc", "opt/old", "var/lib", "moved"):
        (overlay.image / name).mkdir(parents=True)
    for name in ("etc/kept", "etc/deleted", "etc/edited", "opt/old/file", "etc/becomes-dir", "moved/file"):
        (overlay.image / name).write_text(name)
    (overlay.image / "becomes-file").mkdir()

    def change(root: Path) -> None:
        (root / "etc/deleted").unlink()
        (root / "etc/edited").write_text("new")
        shutil.rmtree(root / "opt/old")
        (root / "opt/old").mkdir()
        (root / "opt/old/new").write_text("only this")
        (root / "etc/becomes-dir").unlink()
        (root / "etc/becomes-dir").mkdir()
        (root / "becomes-file").rmdir()
        (root / "becomes-file").write_text("file")
        (root / "link").symlink_to("/etc/passwd")
        (root / "dangling").symlink_to("nowhere")
        (root / ("long" * 40)).write_text("a name longer than ustar holds")
        (root / os.fsdecode(b"not utf-8 \xff")).write_text("x")
        os.mkfifo(root / "fifo", 0o640)
        os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(root / "block", stat.S_IFBLK | 0o600, os.makedev(7, 1000))
        (root / "hard1").write_text("one file")
        (root / "hard2").hardlink_to(root / "hard1")
        (root / "var/lib/hard3").hardlink_to(root / "hard1")
        os.link(root / "link", root / "link2", follow_symlinks=False)
        (root / "fifo2").hardlink_to(root / "fifo")
        (root / "empty").touch()
        owned = root / "owned"
        owned.write_text("owned")
        os.chown(owned, 1234, 4_000_000_000)
        owned.chmod(0o6755)
        os.setxattr(owned, "security.capability", CAPABILITY)
        os.setxattr(owned, "user.binary", bytes(range(256)))
        os.setxattr(root / "var", "trusted.mark", b"\0=\n")
        os.chown(root / "link", 7, 8, follow_symlinks=False)
        for index, path in enumerate(sorted(root.rglob("*"))):
            if not path.is_relative_to(root / "moved"):
                os.utime(path, ns=(0, 1_700_000_000_123_456_000 + index), follow_symlinks=False)
        os.utime(root, ns=(0, 12_345_678_901))
        root.chmod(0o751)

    changed, fresh, diff = carried_over(overlay, change)
    assert facts(fresh) == facts(changed)
    assert not (overlay.base / NAME).read_bytes().count(b"moved/file"), "an unchanged file is in the diff"
    assert diff.removed == 3  # deleted, becomes-dir's opacity or whiteout, old's opacity


def test_a_default_acl_of_the_image_does_not_leak_into_new_files(overlay: Layers) -> None:
    # Version 2; each entry: what it is for, permissions, id. Owner, user 1000, group, mask, others.
    entries = [(1, 7, -1), (2, 7, 1000), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)

    def change(root: Path) -> None:
        (root / "dir").mkdir()
        (root / "dir/plain").write_text("x")
        os.setxattr(root / "dir", "system.posix_acl_default", acl)
        (root / "dir/with-acl").write_text("x")

    changed, fresh, _ = carried_over(overlay, change)
    assert facts(fresh) == facts(changed)
    assert "system.posix_acl_access" in os.listxattr(fresh / "dir/with-acl")
    assert os.listxattr(fresh / "dir/plain") == []


def test_holes_stay_holes(overlay: Layers) -> None:
    def change(root: Path) -> None:
        with (root / "sparse").open("wb") as stream:
            stream.truncate(1 << 40)
            for offset in (0, 123 << 20, (1 << 40) - 5):
                stream.seek(offset)
                stream.write(b"data!")
        with (root / "only-hole").open("wb") as stream:
            stream.truncate(5 << 20)

    changed, fresh, diff = carried_over(overlay, change)
    assert (overlay.base / NAME).stat().st_size < 1 << 20
    assert facts(fresh) == facts(changed)
    assert (fresh / "sparse").stat().st_blocks == (changed / "sparse").stat().st_blocks
    with (fresh / "sparse").open("rb") as stream:
        for offset in (0, 123 << 20, (1 << 40) - 5):
            stream.seek(offset)
            assert stream.read(5) == b"data!"
    assert diff.bytes == (1 << 40) + (5 << 20)


def test_gnu_tar_reads_the_diff(overlay: Layers) -> None:
    def change(root: Path) -> None:
        (root / "a").write_text("content")
        with (root / "sparse").open("wb") as stream:
            stream.seek(1 << 20)
            stream.write(b"end")

    carried_over(overlay, change)
    other = overlay.base / "other"
    other.mkdir()
    subprocess.run(["tar", "--extract", f"--file={overlay.base / NAME}"], cwd=other, check=True)
    assert (other / "a").read_text() == "content"
    assert (other / "sparse").read_bytes() == bytes(1 << 20) + b"end"


def test_mount_points_and_sockets_are_left_out(overlay: Layers) -> None:
    def change(root: Path) -> None:
        for name in ("proc", "data/below", "kept"):
            (root / name).mkdir(parents=True)
        (root / "data/below/file").touch()
        (root / "etc").mkdir()
        (root / "etc/hosts").touch()
        (root / "etc/other").touch()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(root / "kept/socket"))

    _, fresh, _ = carried_over(overlay, change, exclude=("/proc", "/data", "/etc/hosts"))
    found = {str(path.relative_to(fresh)) for path in fresh.rglob("*")}
    assert found == {"kept", "etc", "etc/other"}


def test_a_second_generation_carries_the_first(overlay: Layers) -> None:
    (overlay.image / "old").mkdir()
    (overlay.image / "old/file").touch()

    def change(root: Path) -> None:
        shutil.rmtree(root / "old")
        (root / "old").mkdir()
        (root / "new").write_text("1")

    _, second, _ = carried_over(overlay, change)
    (second / "new").write_text("2")
    write_diff(find_overlay(second), overlay.base / "second.tar")
    third = overlay.mount("third")
    apply_diff(overlay.base / "second.tar", third)
    assert facts(third) == facts(second)
    assert sorted(path.name for path in third.iterdir()) == ["new", "old"]


def test_a_name_like_a_whiteout_is_refused_and_leaves_no_file(overlay: Layers) -> None:
    changed = overlay.mount("changed")
    (changed / "dir").mkdir()
    (changed / "dir/.wh.trap").touch()
    with pytest.raises(Refused, match=r"/dir/\.wh\.trap"):
        write_diff(find_overlay(changed), overlay.base / NAME)
    assert not (overlay.base / NAME).exists()


def test_a_redirected_directory_is_refused_by_name() -> None:
    with layers(",redirect_dir=on") as made:
        (made.image / "before").mkdir()
        (made.image / "before/file").touch()
        changed = made.mount("changed")
        (changed / "before").rename(changed / "after")
        with pytest.raises(Refused, match=r"/after: a moved directory.*redirect_dir=off"):
            write_diff(find_overlay(changed), made.base / NAME)


def test_a_file_without_its_data_is_refused_by_name() -> None:
    with layers(",metacopy=on,redirect_dir=on") as made:
        (made.image / "file").write_text("data")
        changed = made.mount("changed")
        (changed / "file").chmod(0o600)
        with pytest.raises(Refused, match=r"/file: a file whose data is in a lower layer.*metacopy=off"):
            write_diff(find_overlay(changed), made.base / NAME)


def test_other_root_filesystems_are_refused(overlay: Layers, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nothing is mounted there"):
        find_overlay(tmp_path)
    with pytest.raises(Refused, match="the root filesystem is proc"):
        find_overlay(Path("/proc"))
    read_only = overlay.base / "ro-root"
    read_only.mkdir()
    second = overlay.base / "second"
    second.mkdir()
    lower = str(overlay.image).replace(",", "\\,")
    syscalls.mount("overlay", str(read_only), "overlay", 0, f"lowerdir={lower}:{second}")
    with pytest.raises(Refused, match="no upper directory"):
        find_overlay(read_only)


def test_a_full_disk_leaves_no_half_diff(overlay: Layers) -> None:
    changed = overlay.mount("changed")
    (changed / "big").write_bytes(os.urandom(4 << 20))
    small = overlay.base / "small"
    small.mkdir()
    syscalls.mount("tmpfs", str(small), "tmpfs", 0, "size=1m")
    with pytest.raises(OSError, match="No space left"):
        write_diff(find_overlay(changed), small / NAME)
    assert list(small.iterdir()) == []


def test_an_existing_file_is_not_overwritten(overlay: Layers) -> None:
    changed = overlay.mount("changed")
    (overlay.base / NAME).write_text("precious")
    with pytest.raises(FileExistsError):
        write_diff(find_overlay(changed), overlay.base / NAME)
    assert (overlay.base / NAME).read_text() == "precious"


NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CHANGES = st.tuples(st.sampled_from(["write", "mkdir", "remove", "symlink", "link", "chmod", "xattr"]), PATHS, PATHS)


def act(root: Path, change: tuple[str, str, str]) -> None:
    """Do one change; one that the tree does not allow changes nothing."""
    what, path, other = change
    target = root / path
    actions: dict[str, Callable[[], object]] = {
        "write": lambda: target.write_text(other),
        "mkdir": lambda: target.mkdir(parents=True),
        "remove": lambda: shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink(),
        "symlink": lambda: target.symlink_to(other),
        "link": lambda: target.hardlink_to(root / other),
        "chmod": lambda: target.chmod(0o700 if target.is_dir() else 0o4711),
        "xattr": lambda: os.setxattr(target, "user.x", other.encode()),
    }
    try:
        if not target.is_symlink() or what == "remove":
            actions[what]()
    except OSError:
        pass


def act_all(root: Path, changes: list[tuple[str, str, str]]) -> None:
    for change in changes:
        act(root, change)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(CHANGES, max_size=15), st.lists(CHANGES, max_size=20))
def test_any_changes_on_any_image_come_back(
    image: list[tuple[str, str, str]], changes: list[tuple[str, str, str]]
) -> None:
    with layers() as made:
        act_all(made.image, image)
        changed, fresh, _ = carried_over(made, lambda root: act_all(root, changes))
        with tarfile.open(made.base / NAME) as tar:
            names = tar.getnames()
        assert facts(fresh) == facts(changed), names
