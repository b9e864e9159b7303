"""A checkpoint image: whole, or named as what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate_shim.checkpoint.image import manifest
from kybernate_shim.checkpoint.image.digests import Digester
from kybernate_shim.checkpoint.image.store import (
    CheckpointInvalid,
    CheckpointNotFound,
    payload_names,
    read_image,
    require_space,
    write_manifest,
)
from kybernate_shim.checkpoint.image.verification import verify
from kybernate_shim.errors import NoRoom
from tests.unit.checkpoint.image.manifests import MINIMAL


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A finished image of three files and a log."""
    path = tmp_path / "image"
    path.mkdir()
    (path / "pages-1.img").write_bytes(os.urandom(5000))
    (path / "empty.img").touch()
    (path / "core-1.img").write_text("core")
    (path / "dump.log").write_text("log")
    with Digester() as digester:
        files = digester.files(path, payload_names(path))
    write_manifest(path, replace(MINIMAL, files=files))
    return path


def test_a_whole_image_is_read_and_verified(directory: Path) -> None:
    found = read_image(directory)
    assert [file.name for file in found.manifest.files] == ["core-1.img", "empty.img", "pages-1.img"]
    assert verify(directory) == []


@pytest.mark.parametrize("algorithm", ["xxh128", "blake3"])
def test_long_file_is_verified_by_any_algorithm(
    directory: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kybernate_shim.checkpoint.image.digests.PIECE", 1000)
    with Digester(algorithm) as digester:
        files = digester.files(directory, ["core-1.img", "empty.img", "pages-1.img"])
    assert files[2].digest.startswith(f"{algorithm}-tree:")
    write_manifest(directory, replace(MINIMAL, files=files))
    assert verify(directory) == []
    flip_a_bit(directory)
    assert [problem.kind for problem in verify(directory)] == ["changed"]


def test_logs_may_change_after_the_manifest(directory: Path) -> None:
    (directory / "dump.log").write_text("more")
    (directory / "kybernate-restore.log").touch()
    assert verify(directory) == []


def test_verify_tells_its_progress(directory: Path) -> None:
    told: list[tuple[int, int]] = []
    verify(directory, lambda done, total: told.append((done, total)))
    assert max(told) == (5004, 5004)


def flip_a_bit(directory: Path) -> None:
    path = directory / "pages-1.img"
    data = bytearray(path.read_bytes())
    data[4321] ^= 4
    path.write_bytes(data)


def replace_by_link(directory: Path) -> None:
    (directory / "core-1.img").unlink()
    (directory / "core-1.img").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("damage", "file", "kind"),
    [
        (flip_a_bit, "pages-1.img", "changed"),
        (lambda path: os.truncate(path / "pages-1.img", 4999), "pages-1.img", "truncated"),
        (lambda path: os.truncate(path / "pages-1.img", 6000), "pages-1.img", "longer"),
        (lambda path: (path / "core-1.img").unlink(), "core-1.img", "missing"),
        (lambda path: (path / "core-2.img").touch(), "core-2.img", "extra"),
        (replace_by_link, "core-1.img", "changed"),
    ],
)
def test_verify_names_the_damaged_file(directory: Path, damage: Callable[[Path], object], file: str, kind: str) -> None:
    damage(directory)
    assert [(problem.file, problem.kind) for problem in verify(directory)] == [(file, kind)]


def test_a_digest_of_another_release_is_named(directory: Path) -> None:
    found = read_image(directory).manifest
    write_manifest(directory, replace(found, files=(replace(found.files[0], digest="blake9:0"), *found.files[1:])))
    assert [(problem.file, problem.kind) for problem in verify(directory)] == [("core-1.img", "unreadable")]


def test_a_truncated_image_is_not_restored(directory: Path) -> None:
    os.truncate(directory / "pages-1.img", 100)
    (directory / "core-1.img").unlink()
    with pytest.raises(CheckpointInvalid, match=r"core-1.img: missing.*pages-1.img: truncated \(100 bytes found, 5000"):
        read_image(directory)


def test_without_a_manifest_there_is_no_image(directory: Path, tmp_path: Path) -> None:
    (directory / manifest.NAME).unlink()
    for read in (read_image, verify):
        with pytest.raises(CheckpointNotFound, match="not a finished checkpoint image"):
            read(directory)
        with pytest.raises(CheckpointNotFound, match="no such directory"):
            read(tmp_path / "nowhere")


def test_a_broken_manifest_is_named(directory: Path) -> None:
    content = (directory / manifest.NAME).read_bytes()
    (directory / manifest.NAME).write_bytes(content[: len(content) // 2])
    for read in (read_image, verify):
        with pytest.raises(CheckpointInvalid, match=r"kybernate-manifest.json: not JSON"):
            read(directory)


def test_a_manifest_that_cannot_be_written_leaves_no_image(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / manifest.NAME).unlink()
    before = sorted(directory.iterdir())

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(directory, MINIMAL)
    assert sorted(directory.iterdir()) == before


def test_everything_is_on_disk_before_the_manifest_has_its_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_image(directory).manifest
    (directory / manifest.NAME).unlink()
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name  # noqa: PTH115  (a link that is no path)
        synced.append(f"{name}{'+' if (directory / manifest.NAME).exists() else ''}")

    monkeypatch.setattr(os, "fsync", fsync)
    write_manifest(directory, found)
    assert sorted(synced[:3]) == ["core-1.img", "empty.img", "pages-1.img"]
    assert synced[3:] == [f".{manifest.NAME}.tmp", "image+", f"{directory.parent.name}+"]
    synced.clear()
    write_manifest(directory, found, durable=False)
    assert synced == []


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("x"), os.mkfifo])
def test_an_image_takes_plain_files_only(directory: Path, make: Callable[[Path], object]) -> None:
    make(directory / "odd")
    with pytest.raises(CheckpointInvalid, match="plain files only"):
        payload_names(directory)


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    require_space(tmp_path, 1, reserve=0)
    with pytest.raises(NoRoom, match=r"the checkpoint needs about \d+ MiB"):
        require_space(tmp_path, 1 << 60)
