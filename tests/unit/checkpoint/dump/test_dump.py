"""The steps of a checkpoint, and their order."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from kybernate_shim.checkpoint import bound_sockets, dump_plan, frozen_state
from kybernate_shim.checkpoint.dump_request import Dumped
from kybernate_shim.checkpoint.image.store import read_image
from kybernate_shim.errors import Failed, Refused
from tests.unit.checkpoint.dump.dumping import run
from tests.unit.checkpoint.fake_target import FakeAccelerator, FakeTarget


def test_container_that_goes_on_is_thawed_after_criu(target: FakeTarget) -> None:
    run(target)
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert [file.name for file in read_image(target.image).manifest.files] == [
        "inventory.img",
        "kybernate-spec.json",
    ]


def test_container_does_not_wait_for_the_disk(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = frozen_state.finish

    def noted(*arguments: Any) -> Dumped:
        target.steps.append("manifest")
        return finish(*arguments)

    monkeypatch.setattr(frozen_state, "finish", noted)
    run(target)
    assert target.steps == ["freeze", "checkpoint", "thaw", "manifest"]


def test_paused_container_stays_paused(target: FakeTarget) -> None:
    target.cgroup.frozen = True
    run(target)
    assert target.cgroup.frozen
    assert "thaw" not in target.steps


def test_container_that_ends_is_killed_once_there_is_an_image(target: FakeTarget) -> None:
    run(target, exit=True)
    assert target.steps == ["freeze", "checkpoint", "kill with an image"]


def test_criu_ends_what_keeps_its_connections(target: FakeTarget) -> None:
    run(target, exit=True, tcp="established")
    assert target.steps[:2] == ["freeze", "checkpoint that ends it"]
    assert not any(step.startswith("kill") for step in target.steps)


def test_image_of_a_container_that_criu_has_ended_too_early_stays(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CRIU that executes no script does not wait for the proof, which needs the processes."""

    def fails(*arguments: object) -> None:
        raise FileNotFoundError("/proc/7/root")

    monkeypatch.setattr(frozen_state, "make_restorable", fails)
    with pytest.raises(Failed, match=r"could not be completed: /proc/7/root.*keep it until a restore"):
        run(target, exit=True, tcp="established")
    assert read_image(target.image).manifest.tcp == "established"


def test_last_copy_stays_when_even_its_manifest_cannot_be_written(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(frozen_state, "finish", full)
    with pytest.raises(Failed, match="no space"):
        run(target, exit=True, tcp="established")
    assert (target.image / "inventory.img").exists()


def test_processes_run_while_they_leave_their_gpus_and_come_back(target: FakeTarget) -> None:
    target.cgroup.frozen = True
    run(target, FakeAccelerator(target.steps))
    assert target.steps == [
        "thaw",
        "detach",
        "bytes out",
        "release",
        "freeze",
        "checkpoint",
        "bytes complete",
        "thaw",
        "bytes back",
        "attach",
        "freeze",
    ]


def test_child_that_is_forked_before_the_freeze_gives_up_what_it_has_inherited(target: FakeTarget) -> None:
    run(target, FakeAccelerator(target.steps, appearing=2))
    caught = ["release", "freeze", "thaw"]
    assert target.steps[2:10] == [*caught, *caught, "release", "freeze"]


def unbindable(monkeypatch: pytest.MonkeyPatch, *, from_look: int) -> None:
    """Let sockets be found that a restore could not bind, from that look on; the first one is 1."""
    looks = iter(range(1, 10))
    found = [bound_sockets.Unbindable("/tmp/new/one", 1)]
    monkeypatch.setattr(dump_plan.sockets, "container_sockets", lambda pids: [])
    monkeypatch.setattr(bound_sockets, "without_directory", lambda *_: found if next(looks) >= from_look else [])


def test_socket_that_a_restore_could_not_bind_is_refused_at_once(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbindable(monkeypatch, from_look=1)
    with pytest.raises(Refused, match="restore cannot bind the socket there"):
        run(target)
    assert target.steps == []


def test_socket_that_is_bound_before_the_freeze_is_refused(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    unbindable(monkeypatch, from_look=2)
    with pytest.raises(Refused, match="restore cannot bind the socket there"):
        run(target, FakeAccelerator(target.steps), exit=True)
    assert target.steps == ["detach", "bytes out", "release", "freeze", "thaw", "bytes back", "attach", "thaw"]


@pytest.mark.parametrize("allowed", ["rootfs_elsewhere", "force"])
def test_socket_is_let_pass(target: FakeTarget, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    unbindable(monkeypatch, from_look=1)
    run(target, **{allowed: True})
    assert target.steps == ["freeze", "checkpoint", "thaw"]


def test_nobody_is_brought_back_after_the_end(target: FakeTarget) -> None:
    run(target, FakeAccelerator(target.steps), exit=True)
    assert target.steps == [
        "detach",
        "bytes out",
        "release",
        "freeze",
        "checkpoint",
        "bytes complete",
        "kill with an image",
        "forget",
    ]
