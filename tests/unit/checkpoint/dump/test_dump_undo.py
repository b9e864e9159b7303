"""How each step of a checkpoint is undone when a later one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kybernate_shim.checkpoint import dump_manifest, dump_plan
from kybernate_shim.checkpoint.bound_sockets import socket_directory_not_saved
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, read_image
from kybernate_shim.errors import Failed, NoRoom, Refused
from tests.unit.checkpoint.dump.dumping import AWAKE, never, run, writes
from tests.unit.checkpoint.fake_target import FakeAccelerator, FakeTarget


def test_failed_criu_is_quoted_and_everything_undone(target: FakeTarget) -> None:
    target.children.on["checkpoint"] = writes(target, 1, "(00.01) Error (criu/x.c:1): no luck\n")
    with pytest.raises(Failed, match=r"continues as before.*no luck.*work/dump\.log"):
        run(target, FakeAccelerator(target.steps))
    assert target.steps == ["detach", "bytes out", "release", "freeze", "checkpoint", *AWAKE]
    assert not target.image.exists()


def test_log_of_an_earlier_dump_is_not_quoted(target: FakeTarget) -> None:
    target.work.mkdir()
    (target.work / "dump.log").write_text("Error (criu/x.c:1): of yesterday\n")
    target.children.on["checkpoint"] = lambda argv: 1
    with pytest.raises(Failed, match="CRIU left no log"):
        run(target)


def test_container_that_has_ended_is_not_said_to_go_on(target: FakeTarget) -> None:
    def ends(argv: Sequence[str]) -> int:
        target.cgroup.exists = False
        return 1

    target.children.on["checkpoint"] = ends
    with pytest.raises(Failed, match="it has ended"):
        run(target)
    assert target.steps == ["freeze", "checkpoint"]


def test_full_disk_in_the_last_step_does_not_lose_the_container(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump_manifest, "write_manifest", full)
    with pytest.raises(Failed, match=r"continues as before.*No space left"):
        run(target, exit=True)
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert not target.image.exists()


def test_small_disk_is_refused_before_anything_is_touched(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_plan, "memory_bytes", lambda target: 1 << 60)
    with pytest.raises(NoRoom, match="make room"):
        run(target)
    assert target.steps == []
    assert not target.image.exists()


def test_directory_with_an_image_is_refused_and_kept(target: FakeTarget) -> None:
    first = run(target).manifest
    target.steps.clear()
    with pytest.raises(CheckpointInvalid, match="contains a checkpoint image already"):
        run(target)
    assert target.steps == []
    assert read_image(target.image).manifest == first


def test_failure_takes_only_its_own_files_away(target: FakeTarget) -> None:
    target.image.mkdir(mode=0o700)
    (target.image / "notes.img").write_text("mine")
    target.children.on["checkpoint"] = writes(target, 1)
    with pytest.raises(Failed, match="checkpoint of container"):
        run(target)
    assert [path.name for path in target.image.iterdir()] == ["notes.img"]


def test_refused_dump_leaves_no_directory_of_its_own(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise socket_directory_not_saved("c", [])

    monkeypatch.setattr("kybernate_shim.checkpoint.dump.plan_dump", refuse)
    with pytest.raises(Refused, match="the container has created the directory, and without the changed files"):
        run(target)
    assert not target.work.exists()
    assert not target.image.exists()


def test_deadline_is_named_and_everything_undone(target: FakeTarget) -> None:
    target.children.on["checkpoint"] = never
    with pytest.raises(TimeoutError, match=r"continues as before: it did not end within 3 s"):
        run(target, deadline=3)
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert not target.image.exists()


def test_work_directory_in_the_way_leaves_no_image_directory(target: FakeTarget) -> None:
    target.work.write_text("a file")
    with pytest.raises(Refused, match="work: Not a directory"):
        run(target)
    assert target.steps == []
    assert not target.image.exists()
