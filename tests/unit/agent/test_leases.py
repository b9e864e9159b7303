"""Images that are open for other agents: for whom, how long, how many; and what is read of their directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.agent.sending import leases as module
from kybernate.agent.sending.leases import LASTS_SECONDS, Leases
from kybernate.agent.sending.opened import OpenedImage
from kybernate.node.failure import Exhausted, Failure, Missing
from kybernate_shim.linux.locks import held, try_lock_directory
from tests.fakes.sized_image import MIB, write_sized_image
from tests.unit.agent.access.conftest import Log


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_sized_image(tmp_path / "web", id="1", mib=1)
    return tmp_path / "web"


@pytest.fixture
def image(directory: Path) -> Iterator[OpenedImage]:
    found = OpenedImage.of(directory)
    yield found
    try:
        found.close()
    except OSError:
        pass  # it was closed by the test


def is_locked(directory: Path) -> bool:
    with held(try_lock_directory(directory)) as free:
        return not free


def test_image_closes_when_nothing_was_read_for_some_time(image: OpenedImage) -> None:
    clock = Clock()
    leases = Leases(Log(), clock)
    lease = leases.add(image, "node-2")
    clock.now = LASTS_SECONDS - 1
    leases.end_unused()
    with leases.reading(lease.token, "node-2"):
        clock.now = 5 * LASTS_SECONDS
        leases.end_unused()
        assert is_locked(image.directory)
    clock.now = 6 * LASTS_SECONDS - 1
    leases.end_unused()
    assert is_locked(image.directory)
    clock.now = 7 * LASTS_SECONDS
    leases.end_unused()
    assert not is_locked(image.directory)
    with pytest.raises(Missing), leases.reading(lease.token, "node-2"):
        pass


def test_image_that_is_closed_while_it_is_read_is_read_to_the_end(image: OpenedImage) -> None:
    leases = Leases(log := Log())
    lease = leases.add(image, "node-2")
    with leases.reading(lease.token, "node-2"):
        leases.end(lease.token, "node-2")
        with image.file(0) as descriptor:
            assert len(os.pread(descriptor, 5, 0)) == 5
    assert not is_locked(image.directory)
    assert [event for _, event, _ in log.lines] == ["image.sent"]


def test_image_is_the_callers_own(image: OpenedImage) -> None:
    leases = Leases(Log())
    lease = leases.add(image, "node-2")
    leases.end(lease.token, "node-3")
    with pytest.raises(Missing), leases.reading(lease.token, "node-3"):
        pass
    with leases.reading(lease.token, "node-2"):
        pass


def test_one_caller_opens_only_so_many(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 2)
    leases = Leases(Log())
    for caller in ("node-2", "node-2", "node-3"):
        leases.add(OpenedImage.of(directory), caller)
    with pytest.raises(Exhausted, match="images open"):
        leases.add(OpenedImage.of(directory), "node-2")


def test_large_holes_are_known(image: OpenedImage) -> None:
    names = [file.name for file in image.files]
    holes = image.holes()
    (begin, size) = holes[names.index("zeros.img")][-1]
    assert begin + size == 9 * MIB + 11
    assert size >= 5 * MIB
    assert holes[names.index("core-1.img")] == holes[names.index("empty.img")] == []


@pytest.mark.parametrize("damage", ["gone", "link", "fifo", "longer"])
def test_file_that_is_not_the_manifests_is_not_read(image: OpenedImage, damage: str) -> None:
    path = image.directory / image.files[0].name
    match damage:
        case "longer":
            path.write_bytes(bytes(path.stat().st_size + 1))
        case _:
            path.unlink()
    if damage == "link":
        path.symlink_to("/etc/passwd")
    if damage == "fifo":
        os.mkfifo(path)
    with pytest.raises(Failure, match=r"cannot be (opened|read)|in the manifest"), image.file(0):
        pass


def test_directory_that_is_being_removed_is_not_opened(directory: Path) -> None:
    with held(try_lock_directory(directory)), pytest.raises(Failure, match="is being removed"):
        OpenedImage.of(directory)
    with pytest.raises(Failure, match="is not a complete image"):
        OpenedImage.of(directory.parent)
