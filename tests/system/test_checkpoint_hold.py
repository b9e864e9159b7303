"""Containers that stay frozen after their checkpoint, until they are moved elsewhere or run on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.lab.node import Containerd
from tests.system.checkpoints import (
    Witness,
    assert_whole,
    counting,
    holding,
    in_background,
    in_the_middle,
    kybernate,
    refused,
    restored,
    shim_of,
)
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.tenants import pods_place

COUNTER = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"]


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory for images, which does not stay."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def counter(ours: Ctr) -> Iterator[Witness]:
    with counting(ours) as witness:
        yield witness


def state(id: str) -> str:
    (found,) = [one for one in json.loads(kybernate("ps", "--json")) if one["container"] == id]
    return str(found["state"])


def hold(counter: Witness, image: Path, *flags: str) -> None:
    said = kybernate("checkpoint", counter.id, str(image), *(flags or ("--hold",)))
    assert f"{counter.id} is held" in said
    assert state(counter.id) == "held"
    assert_whole(image)


def test_held_container_is_released_and_runs_on(ours: Ctr, counter: Witness, scratch: Path) -> None:
    hold(counter, scratch / "image")
    counter.assert_stands_still()
    assert ours.status(counter.id) == "RUNNING"
    assert "cannot exec a held container" in refused("ctr", "task", "exec", "--exec-id", "e", counter.id, "true")
    assert "cannot checkpoint a held container" in refused("kybernate", "checkpoint", counter.id, str(scratch / "2"))
    assert "released" in kybernate("release", counter.id)
    counter.assert_goes_on()
    assert state(counter.id) == "running"
    assert "is not held" in refused("kybernate", "release", counter.id)
    kybernate("checkpoint", counter.id, str(scratch / "2"))


def test_what_ends_a_held_container_loses_nothing(ours: Ctr, counter: Witness, scratch: Path) -> None:
    hold(counter, scratch / "image")
    last = counter.count()
    ours("task", "kill", "-s", "SIGTERM", counter.id)
    eventually(lambda: ours.status(counter.id) == "STOPPED")
    assert counter.count() == last
    with restored(ours, scratch / "image", log=counter.log) as second:
        eventually(lambda: second.count() > last + 3)
        second.assert_goes_on()


def test_deadline_lets_a_held_container_run_on(counter: Witness, scratch: Path) -> None:
    said = kybernate("checkpoint", counter.id, str(scratch / "image"), "--hold-for", "0.2")
    assert "is held" in said
    eventually(lambda: state(counter.id) == "running")
    counter.assert_goes_on()


def test_limit_of_a_freeze_is_over_with_the_image_and_does_not_end_a_hold(counter: Witness, scratch: Path) -> None:
    limit = 8.0
    hold(counter, scratch / "image", "--hold-for", "600", "--max-freeze", f"{limit:g}s")

    def held_longer_than_the_limit() -> bool:
        left = float(json.loads(kybernate("status", counter.id, "--json"))["held_seconds"])
        assert left, "it is not held any more"
        return left < 600 - limit

    eventually(held_longer_than_the_limit, seconds=60, pause=0.5)
    counter.assert_stands_still()
    assert_whole(scratch / "image")
    kybernate("release", counter.id)
    counter.assert_goes_on()


def test_program_that_was_executed_before_a_hold_may_be_killed_without_an_end_of_it(
    ours: Ctr, counter: Witness, scratch: Path
) -> None:
    """As containerd kills the program of a probe whose time is over."""
    flags = ["--detach", "--log-uri", "file:///dev/null", "--exec-id", "probe"]
    ours("task", "exec", *flags, counter.id, "sleep", "1000")
    hold(counter, scratch / "image")
    ours("task", "kill", "--exec-id", "probe", "--signal", "SIGKILL", counter.id)
    counter.assert_stands_still()
    assert state(counter.id) == "held"
    kybernate("release", counter.id)
    counter.assert_goes_on()


def test_restart_of_containerd_changes_nothing(
    ours: Ctr, containerd: Containerd, counter: Witness, scratch: Path
) -> None:
    hold(counter, scratch / "image")
    containerd.restart()
    counter.assert_stands_still()
    assert state(counter.id) == "held"
    kybernate("release", counter.id)
    counter.assert_goes_on()


def test_shim_that_is_killed_leaves_no_frozen_container(ours: Ctr, counter: Witness, scratch: Path) -> None:
    hold(counter, scratch / "image")
    last, init = counter.count(), ours.pid(counter.id)
    os.kill(shim_of(ours, counter.id).pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{init}").exists())
    assert counter.count() == last  # it has not run once more
    with restored(ours, scratch / "image", log=counter.log) as second:
        eventually(lambda: second.count() > last + 3)
        second.assert_goes_on()


def test_stop_of_a_held_pod_does_not_wait_for_its_grace(scratch: Path) -> None:
    with Cri("kybernate") as cri, pods_place() as image:
        with cri.pod() as pod:
            id = cri.run(pod, "counter", COUNTER)
            cri.await_log(pod, "counter", "5")
            kybernate("checkpoint", f"default/{pod.config.metadata.name}", image.name, "--hold")
            last = cri.log(pod, "counter")[-1]
            with pytest.raises(grpc.RpcError, match="cannot exec a held container"):
                cri.exec(id, "true")  # as a probe does
            cri.stop(id, grace=3600)  # longer than the call may take
            assert cri.log(pod, "counter")[-1] == last
        with cri.pod(annotations={"kybernate.io/restore-from": image.name}) as pod:
            cri.run(pod, "counter", ["/never/run"])
            assert eventually(lambda: cri.log(pod, "counter"))[0] == str(int(last) + 1)


def test_hold_is_not_for_what_ends(counter: Witness, scratch: Path) -> None:
    image = str(scratch / "image")
    for flag in ("--exit", "--tcp=established"):
        assert "--hold excludes --exit" in refused("kybernate", "checkpoint", counter.id, image, "--hold", flag)
    counter.assert_goes_on()


def test_kill_in_a_checkpoint_says_that_the_container_has_ended(ours: Ctr, scratch: Path) -> None:
    with holding(ours, 300) as counter:
        command = ["kybernate", "checkpoint", counter.id, str(scratch / "image")]
        with in_background(lambda: refused(*command)) as failing:
            in_the_middle(scratch / "image", 1)
            ours("task", "kill", "-s", "SIGKILL", counter.id)
            said = failing.result(60)
        assert "was killed" in said
        assert "is running" not in said
