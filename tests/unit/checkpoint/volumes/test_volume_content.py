"""The content of a pod's own volumes on its way into an image and into the volumes of another pod."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from kybernate_shim.checkpoint.image.manifest import ImageVolume
from kybernate_shim.checkpoint.rootfs.apply import Powers
from kybernate_shim.checkpoint.tree_tar import ENTRY_BYTES
from kybernate_shim.checkpoint.volumes import fill as filling
from kybernate_shim.checkpoint.volumes import marks
from kybernate_shim.checkpoint.volumes import save as saving
from kybernate_shim.checkpoint.volumes.fill import PlacedVolume, fill, placed
from kybernate_shim.checkpoint.volumes.places import PodVolume
from kybernate_shim.checkpoint.volumes.save import ChosenVolumes, measure, require_small, save, wanted
from kybernate_shim.config import Config
from kybernate_shim.errors import Failed, Refused, Stopped
from kybernate_shim.linux import beneath
from kybernate_shim.linux.beneath import TreeFile
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import CONTAINER_TYPE, POD_UID

ALL = {"process": {"capabilities": {"bounding": ["CAP_SETUID", "CAP_MKNOD", "CAP_SYS_ADMIN"]}}}
LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def _mark_for_any_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is an attribute that root alone can set."""
    names = ("user.kybernate.filled", "user.kybernate.volume")
    for name, value in (("FILLED", names[0]), ("IDENTITY", names[1]), ("MARKS", names)):
        monkeypatch.setattr(marks, name, value)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    volume = tmp_path / "old"
    (volume / "deep/er").mkdir(parents=True)
    (volume / "deep/er/file").write_text("content")
    (volume / "twin").hardlink_to(volume / "deep/er/file")
    (volume / "link").symlink_to("deep/er/file")
    (volume / ".wh.file").write_text("no whiteout here")
    os.mkfifo(volume / "fifo")
    with (volume / "holes").open("wb") as file:
        file.seek(1 << 24)
        file.write(b"end")
    return volume


def chosen(volume: Path, limit: int = LIMIT) -> ChosenVolumes:
    return ChosenVolumes((PodVolume("data", "empty-dir", str(volume), ("/data",)),), 0, limit)


def saved(volume: Path, image: Path, limit: int = LIMIT) -> tuple[ImageVolume, ...]:
    image.mkdir(exist_ok=True)
    return save(chosen(volume, limit), image)


def filled(image: Path, volumes: tuple[ImageVolume, ...], new: Path, document: dict[str, object] | None = None) -> None:
    sizes = {file.name: file.stat().st_size for file in image.iterdir()}
    fill([PlacedVolume(volume, str(new)) for volume in volumes], image, sizes, Spec(document or ALL))


def facts(volume: Path) -> dict[str, tuple[int, int, int, str]]:
    found = {}
    for path in sorted(volume.rglob("*")):
        status = path.lstat()
        content = path.read_text()[-20:] if stat.S_ISREG(status.st_mode) else ""
        found[str(path.relative_to(volume))] = (status.st_mode, status.st_nlink, status.st_mtime_ns, content)
    return found


def test_content_comes_into_an_empty_volume_as_it_was(old: Path, tmp_path: Path) -> None:
    volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    filled(tmp_path / "image", volumes, new)
    assert facts(new) == facts(old)
    assert (new / "holes").stat().st_blocks == (old / "holes").stat().st_blocks
    assert volumes[0].bytes < 1 << 16
    assert measure([PodVolume("data", "empty-dir", str(old), ())])["data"] < 1 << 16


def test_first_restore_replaces_what_an_init_container_has_made(old: Path, tmp_path: Path) -> None:
    volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    (new / "twin").write_text("of the init container")
    (new / "other").write_text("stays")
    filled(tmp_path / "image", volumes, new)
    assert ((new / "twin").read_text(), (new / "other").read_text()) == ("content", "stays")


def test_later_restore_adds_and_changes_nothing(old: Path, tmp_path: Path) -> None:
    volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    filled(tmp_path / "image", volumes, new)
    (new / "deep/er/file").write_text("changed since")
    (new / "link").unlink()
    (new / "link").mkdir()
    (new / "fifo").unlink()
    filled(tmp_path / "image", volumes, new)
    assert (new / "twin").read_text() == "changed since"
    assert (new / "link").is_dir()
    assert (new / "fifo").is_fifo()


def test_mark_does_not_travel(old: Path, tmp_path: Path) -> None:
    os.setxattr(old, "user.kybernate.filled", b"1")
    volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    (new / "twin").write_text("of the init container")
    filled(tmp_path / "image", volumes, new)
    assert (new / "twin").read_text() == "content"


def test_volume_that_its_content_is_from_stays_as_it_is(old: Path, tmp_path: Path) -> None:
    """A container that is restarted in its pod, whose sidecar has written, made and removed files since."""
    volumes = saved(old, tmp_path / "image")
    assert volumes[0].id
    (old / "link").unlink()
    (old / "deep/er/file").write_text("of the sidecar")
    before = facts(old)
    filled(tmp_path / "image", volumes, old)
    assert facts(old) == before


def test_identity_stays_that_of_the_volume_and_does_not_travel(old: Path, tmp_path: Path) -> None:
    first, second = (saved(old, tmp_path / name) for name in ("one", "two"))
    assert first[0].id == second[0].id
    (new := tmp_path / "new").mkdir()
    filled(tmp_path / "one", first, new)
    third = saved(new, tmp_path / "three")
    assert third[0].id not in ("", first[0].id)


def test_content_without_an_identity_is_put_back(old: Path, tmp_path: Path) -> None:
    """Of an older release, or from a filesystem without attributes."""
    (volume,) = saved(old, tmp_path / "image")
    (old / "link").unlink()
    filled(tmp_path / "image", (replace(volume, id=""),), old)
    assert (old / "link").is_symlink()


def test_many_empty_files_count(old: Path, tmp_path: Path) -> None:
    for number in range(50):
        (old / f"empty{number}").touch()
    assert measure([PodVolume("data", "empty-dir", str(old), ())])["data"] > 50 * 1024
    with pytest.raises(Refused, match=", or raise the limit in /etc/kybernate/shim"):
        saved(old, tmp_path / "image", limit=50 * 1024)
    assert list((tmp_path / "image").iterdir()) == []


def test_attributes_count(old: Path, tmp_path: Path) -> None:
    for path in ("twin", ".wh.file"):
        os.setxattr(old / path, "user.large", bytes(2000))
    with pytest.raises(Refused, match=", or raise the limit in /etc/kybernate/shim"):
        saved(old, tmp_path / "image", limit=measure([PodVolume("data", "empty-dir", str(old), ())])["data"] - 512)


def test_programs_with_rights_of_others_are_for_containers_that_can_make_them(old: Path, tmp_path: Path) -> None:
    (old / "program").touch()
    (old / "program").chmod(0o6755)
    volumes = saved(old, tmp_path / "image")
    for name, document, mode in (("one", ALL, 0o6755), ("two", {"process": {}}, 0o755)):
        (new := tmp_path / name).mkdir()
        (old / "fifo").unlink(missing_ok=True)
        filled(tmp_path / "image", volumes, new, document)
        assert stat.S_IMODE((new / "program").stat().st_mode) == mode


def test_sizes_are_named_beyond_the_limit() -> None:
    with pytest.raises(Refused, match=r"3 MiB \(data 2 MiB, dev-shm 1 MiB\), more than .*, 2 MiB.*: -data"):
        require_small({"dev-shm": 1 << 20, "data": 2 << 20}, 2 << 20)


def test_volume_that_grows_beyond_the_limit_leaves_no_file(old: Path, tmp_path: Path) -> None:
    (old / "large").write_bytes(os.urandom(1 << 16))
    with pytest.raises(Refused, match=", or raise the limit in /etc/kybernate/shim"):
        saved(old, tmp_path / "image", limit=1 << 15)
    assert list((tmp_path / "image").iterdir()) == []


def test_saving_ends_when_it_is_stopped(old: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    with pytest.raises(Stopped, match="the volumes were not read to their end"):
        save(
            ChosenVolumes((PodVolume("data", "empty-dir", str(old), ()),), 0, LIMIT),
            tmp_path / "image",
            stopped=lambda: True,
        )
    assert list((tmp_path / "image").iterdir()) == []


@pytest.mark.parametrize("gone", ["deep", "twin"])
def test_what_another_container_takes_away_meanwhile_is_left_out(
    old: Path, tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of the pod that are not frozen are as they were before."""
    real = beneath.pin

    def pin(directory: int, name: str) -> int:
        fd = real(directory, name)
        if name == "fifo":
            (old / gone).rename(tmp_path / "away")
        return fd

    with monkeypatch.context() as patched:
        patched.setattr(beneath, "pin", pin)
        volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    filled(tmp_path / "image", volumes, new)
    assert {path.name for path in new.iterdir()} == {".wh.file", "deep", "fifo", "holes", "link", "twin"} - {gone}


def test_file_that_is_made_shorter_meanwhile_keeps_its_size(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old / "holes").unlink()
    (old / ".wh.file").write_text("x" * 1000)
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        os.truncate(old / ".wh.file", 10)
        return real(fd, size, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", pread)
        volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    filled(tmp_path / "image", volumes, new)
    assert (new / ".wh.file").read_bytes() == (b"x" * 10).ljust(1000, b"\0")


def test_socket_without_its_process_is_left_out(old: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(old / "socket"))
    (new := tmp_path / "new").mkdir()
    filled(tmp_path / "image", saved(old, tmp_path / "image"), new)
    assert not (new / "socket").exists()


def test_second_filling_waits_for_the_first(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = saved(old, tmp_path / "image")
    (new := tmp_path / "new").mkdir()
    begun, goes = Event(), Event()
    real = filling.apply_diff

    def slow(*arguments: object, **options: object) -> object:
        begun.set()
        assert goes.wait(20)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(filling, "apply_diff", slow)
    thread = Thread(target=filled, args=(tmp_path / "image", volumes, new))
    thread.start()
    assert begun.wait(20)
    with pytest.raises(Stopped):
        fill([PlacedVolume(volumes[0], str(new))], tmp_path / "image", {}, Spec(ALL), stopped=lambda: True)
    goes.set()
    thread.join(20)
    assert (new / "twin").read_text() == "content"


def test_link_in_the_place_of_the_volume_is_refused(old: Path, tmp_path: Path) -> None:
    volumes = saved(old, tmp_path / "image")
    (tmp_path / "node").mkdir()
    (tmp_path / "new").symlink_to(tmp_path / "node")
    with pytest.raises(Failed, match="data"):
        filled(tmp_path / "image", volumes, tmp_path / "new")
    assert list((tmp_path / "node").iterdir()) == []


VOLUME = ImageVolume("v.tar", "data", "empty-dir", ("/data",), 1, 100)
SOURCE = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/data"


def pods_spec(source: str, at: str) -> Spec:
    return Spec(
        {
            "annotations": {CONTAINER_TYPE: "container", POD_UID: "u"},
            "mounts": [{"destination": at, "source": source}],
        }
    )


def test_content_goes_where_the_new_pod_has_the_volume() -> None:
    assert placed([VOLUME], pods_spec(SOURCE, "/data"), "", 100 + ENTRY_BYTES) == [PlacedVolume(VOLUME, SOURCE)]
    assert placed([VOLUME], pods_spec(SOURCE, "/data"), "-data", 100) == []
    assert placed([VOLUME], pods_spec("/srv", "/data"), "none", 100) == []


@pytest.mark.parametrize(("source", "at"), [("/srv", "/data"), (SOURCE, "/elsewhere")])
def test_content_without_a_volume_is_refused(source: str, at: str) -> None:
    with pytest.raises(Refused, match=r"data at /data.*: -data"):
        placed([VOLUME], pods_spec(source, at), "", 100)


def test_more_content_than_this_node_accepts_is_refused() -> None:
    with pytest.raises(Refused, match="volumes_limit"):
        placed([VOLUME], pods_spec(SOURCE, "/data"), "", 99)


def test_name_that_is_asked_for_must_be_that_of_a_volume() -> None:
    spec = pods_spec(SOURCE, "/data")
    with pytest.raises(Refused, match=r"'dta' is not one of .* which has data. Nothing was changed"):
        wanted(spec, Config(), chosen="dta")
    assert wanted(spec, Config(), chosen="-data").volumes == ()


def test_content_that_is_left_out_does_not_count() -> None:
    large = ImageVolume("w.tar", "cache", "empty-dir", ("/cache",), 1, 100)
    assert placed([VOLUME, large], pods_spec(SOURCE, "/data"), "-cache", 100 + ENTRY_BYTES) == [
        PlacedVolume(VOLUME, SOURCE)
    ]


def test_what_no_restore_could_make_is_refused_at_the_checkpoint(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "image").mkdir()
    os.setxattr(old / "twin", "user.made", b"by another container")
    monkeypatch.setattr(saving, "TRUSTED", "user.made")
    what = replace(chosen(old), powers=Powers(trusted_attributes=False))
    with pytest.raises(Refused, match=r"/twin has a trusted attribute.*CAP_SYS_ADMIN.*: -data\)"):
        save(what, tmp_path / "image")
    assert list((tmp_path / "image").iterdir()) == []
    device = TreeFile("null", -1, Path("/dev/null").stat())
    with pytest.raises(Refused, match=r"/null is a device node.*CAP_MKNOD"):
        saving._require_makeable(what.volumes[0], device, (), Powers(devices=False))
    saving._require_makeable(what.volumes[0], device, (), Powers())
