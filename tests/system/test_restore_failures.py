"""What can go wrong at a restore, and what must hold afterwards.

A restore that failed has left no process, mount or cgroup behind, which the check after every test of this directory
looks for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kybernate_shim.checkpoint.image.manifest import ManifestInvalid
from tests.lab.node import Containerd
from tests.messages import cri_config_pb2
from tests.system.checkpoints import (
    COUNT,
    MANIFEST,
    PROMPTLY,
    PYTHON,
    counting,
    first,
    holding,
    kill,
    kybernate,
    refused,
    restored,
    save,
)
from tests.system.cri import Cri
from tests.system.ctr import BUSYBOX, Ctr, eventually, run
from tests.system.held import held_restore
from tests.system.leftovers import Snapshot
from tests.system.programs import script
from tests.system.tenants import close_to_others, pods_place, sign_for

BIG = 512  # MiB: a restore that takes long enough to be hit in the middle


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where an image shall be; nothing is there yet."""
    return tmp_path / "image"


# -- the image ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of a counting container."""
    path = tmp_path_factory.mktemp("good") / "image"
    with counting(Ctr()) as witness:
        save(Ctr(), witness.id, path)
    return path


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    """A copy of the image, for a test to damage."""
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def truncated(image: Path) -> str:
    os.truncate(image / "pages-1.img", (image / "pages-1.img").stat().st_size - 4096)
    return r"pages-1\.img: truncated"


def flipped(image: Path) -> str:
    with (image / "pages-1.img").open("r+b") as pages:
        pages.seek(12345)
        (byte,) = pages.read(1)
        pages.seek(12345)
        pages.write(bytes([byte ^ 1]))
    return r"pages-1\.img: changed"


def without_a_file(image: Path) -> str:
    (image / "core-1.img").unlink()
    return r"core-1\.img: missing"


def without_manifest(image: Path) -> str:
    (image / MANIFEST).unlink()
    return "not a finished checkpoint image"


def with_a_torn_manifest(image: Path) -> str:
    os.truncate(image / MANIFEST, 100)
    return "not JSON"


def of_a_newer_release(image: Path) -> str:
    edited(image, lambda manifest: manifest.update(version=99))
    return "version: 99 is not supported"


def with_an_extra_file(image: Path) -> str:
    (image / "core-99.img").write_bytes(b"x")
    return r"core-99\.img: extra"


def of_another_architecture(image: Path) -> str:
    edited(image, lambda manifest: manifest["host"].update(architecture="s390x"))
    return "architecture: the image was made with s390x, found here: "


def of_other_registers(image: Path) -> str:
    edited(image, lambda manifest: manifest["host"]["cpu_features"].append("sve2"))
    return "CPU registers: the image was made with sve2"


def of_another_cgroup_version(image: Path) -> str:
    edited(image, lambda manifest: manifest["host"].update(cgroup_version=3 - manifest["host"]["cgroup_version"]))
    return "cgroup version: the image was made with"


def with_other_instructions(image: Path) -> str:
    edited(image, lambda manifest: manifest["host"]["cpu_features"].append("brandnew"))
    return "CPU features: the image was made with brandnew"


def edited(image: Path, edit: Callable[[dict], None]) -> None:  # type: ignore[type-arg]  # parsed JSON
    manifest = json.loads((image / MANIFEST).read_text())
    edit(manifest)
    (image / MANIFEST).write_text(json.dumps(manifest))


REFUSALS = (
    truncated,
    flipped,
    without_a_file,
    without_manifest,
    with_a_torn_manifest,
    of_a_newer_release,
    with_an_extra_file,
    of_another_architecture,
    of_other_registers,
    of_another_cgroup_version,
)


def restore_refused(ctr: Ctr, image: Path, *flags: str) -> str:
    """Try to restore by the annotation, and return the error; the container can be deleted without delay."""
    id = ctr.new_id("r")
    annotation = ["--annotation", f"kybernate.io/restore-from={image}"]
    said = refused(*ctr.run_argv(id, "sleep", "1000", flags=["-d", *annotation, *flags]))
    begin = time.monotonic()
    ctr.remove(id)
    assert time.monotonic() - begin < PROMPTLY
    return said


def matches(pattern: str, text: str) -> bool:
    assert re.search(pattern, text), f"{pattern!r} is not in {text}"
    return True


@pytest.mark.parametrize("damage", REFUSALS)
def test_image_is_refused_by_name(ours: Ctr, damaged: Path, damage: Callable[[Path], str]) -> None:
    reason = damage(damaged)
    before = Snapshot.take()
    assert matches(reason, restore_refused(ours, damaged))
    assert not before.added(Snapshot.take()).get("cgroups")


@pytest.mark.parametrize("damage", [truncated, flipped, without_a_file, with_an_extra_file])
def test_inspect_finds_the_damage(damaged: Path, damage: Callable[[Path], str]) -> None:
    reason = damage(damaged).replace(": ", " +")
    done = run(["kybernate", "inspect", "--verify", str(damaged)], status=1)
    assert matches(reason, done)


@pytest.mark.parametrize("damage", [truncated, flipped, of_another_architecture])
def test_restore_command_refuses_and_leaves_nothing(damaged: Path, damage: Callable[[Path], str]) -> None:
    reason = damage(damaged)
    sign_for(damaged, "")
    assert matches(reason, refused("kybernate", "restore", "--image", BUSYBOX, "--detach", str(damaged)))


def pods_copy(good: Path, image: Path, damage: Callable[[Path], str]) -> str:
    """Copy an image to where pods have theirs, damage it, and sign what can still be signed."""
    shutil.copytree(good, image)
    close_to_others(image)
    reason = damage(image)
    with suppress(FileNotFoundError, ManifestInvalid):
        sign_for(image)
    close_to_others(image)
    return reason


def test_pod_says_why_its_container_was_not_restored(good: Path) -> None:
    """The texts of CreateContainer's and StartContainer's errors are what the pod's events show."""
    cri = Cri()
    with cri.pod() as pod:
        for attempt, damage in enumerate((*REFUSALS, None)):
            with pods_place() as image:
                reason = pods_copy(good, image, damage) if damage is not None else "no such directory"
                wish = {"kybernate.io/restore-from": image.name}
                id = cri.create(pod, "c", ["sleep", "1000"], attempt=attempt, annotations=wish)
                with pytest.raises(grpc.RpcError) as failure:
                    cri.start(id)
            assert matches(reason, failure.value.details())
            begin = time.monotonic()
            cri.remove(id)
            assert time.monotonic() - begin < PROMPTLY
        id = cri.run(pod, "after", ["sleep", "1000"])
        assert cri.state(id) == "RUNNING"
    cri.close()


def test_missing_directory_is_named(ours: Ctr, tmp_path: Path) -> None:
    assert "/no-image: no such directory" in restore_refused(ours, tmp_path / "no-image")


def test_force_takes_a_risk(ours: Ctr, damaged: Path) -> None:
    reason = with_other_instructions(damaged)
    said = restore_refused(ours, damaged)
    assert matches(reason, said)
    assert 'kybernate.io/force: "true" overrides this' in said
    log = Path(f"/tmp/{ours.new_id('log')}")
    with restored(ours, damaged, log=log, flags=["--annotation", "kybernate.io/force=true"]) as witness:
        witness.assert_goes_on()
    log.unlink()


@pytest.mark.parametrize("damage", [flipped, of_another_architecture, of_another_cgroup_version, of_other_registers])
def test_force_does_not_take_what_cannot_work(ours: Ctr, damaged: Path, damage: Callable[[Path], str]) -> None:
    reason = damage(damaged)
    assert matches(reason, restore_refused(ours, damaged, "--annotation", "kybernate.io/force=true"))


# -- mounts ---------------------------------------------------------------------------------------------------------


def test_mount_that_the_image_does_not_know_is_named(ours: Ctr, good: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    said = restore_refused(ours, good, "--mount", f"type=bind,src={tmp_path}/data,dst=/data,options=rbind:rw")
    assert "/data is mounted in the new container, but was not in the dumped one" in said


def test_mount_that_the_new_container_lacks_is_named(ours: Ctr, place: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with counting(ours, flags=["--mount", f"type=bind,src={tmp_path}/data,dst=/data,options=rbind:rw"]) as witness:
        save(ours, witness.id, place)
    said = restore_refused(ours, place)
    assert "/data was mounted from outside the dumped container, and is not in the new one" in said


def test_pod_without_a_volume_is_refused_by_the_mount(tmp_path: Path, pods_image: Path) -> None:
    (tmp_path / "data").mkdir()
    cri = Cri()
    volume = cri_config_pb2.Mount(container_path="/data", host_path=str(tmp_path / "data"))
    with cri.pod() as pod:
        id = cri.run(pod, "c", COUNT, mounts=[volume])
        cri.await_log(pod, "c", "3")
        kybernate("checkpoint", id, str(pods_image))
    with cri.pod(annotations={"kybernate.io/restore-from": pods_image.name}) as pod:
        id = cri.create(pod, "c", COUNT)
        with pytest.raises(grpc.RpcError, match="/data was mounted from outside"):
            cri.start(id)
        cri.remove(id)
    cri.close()


# -- programs that end ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with so much memory that a restore is far from done when CRIU begins to read it."""
    path = tmp_path_factory.mktemp("big") / "image"
    with holding(Ctr(), BIG) as witness:
        save(Ctr(), witness.id, path)
    return path


def restoring(ctr: Ctr, id: str, image: Path, *flags: str) -> list[str]:
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    return own.run_argv(id, "false", flags=["-d", "--annotation", f"kybernate.io/restore-from={image}", *flags])


@contextmanager
def new_id(ctr: Ctr) -> Iterator[str]:
    """Give an id for a restore that fails; what bears it must be quick to delete."""
    id = ctr.new_id("r")
    try:
        yield id
    finally:
        begin = time.monotonic()
        ctr.remove(id)
        took = time.monotonic() - begin
    assert took < PROMPTLY


@pytest.mark.parametrize("program", ["criu", "runc"])
def test_program_killed_in_the_middle_of_a_restore(ours: Ctr, big: Path, program: str) -> None:
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            kill(first(program))
        said = restore.result()
        assert "nothing is left of it" in said
        assert "restore.log" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_failing_runtime_at_restore_is_quoted(ours: Ctr, good: Path, shim_config: Path, tmp_path: Path) -> None:
    fails = script(
        tmp_path / "runc",  # an image is restored by the runtime that it was made with
        'case "$*" in *" restore "*) echo \'{"level":"error","msg":"no restore today"}\' >>"$4"; exit 1;; esac\n'
        'exec /usr/sbin/runc "$@"',
    )
    shim_config.write_text(f'runtime = "{fails}"\n')
    assert "no restore today" in restore_refused(ours, good)


def test_restored_processes_that_cannot_be_taken_over_are_ended(
    ours: Ctr, good: Path, shim_config: Path, tmp_path: Path
) -> None:
    """CRIU has succeeded, and nothing says what it has made."""
    forgets = script(
        tmp_path / "runc",
        'case "$*" in *" restore "*) ;; *) exec /usr/sbin/runc "$@";; esac\n'
        '/usr/sbin/runc "$@" || exit\n'
        'while [ "$1" != --pid-file ]; do shift; done\n'
        'rm "$2"',
    )
    shim_config.write_text(f'runtime = "{forgets}"\n')
    before = Snapshot.take()
    assert "init.pid" in restore_refused(ours, good)
    left = before.added(Snapshot.take())
    assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_deadline_of_a_restore(ours: Ctr, big: Path, shim_config: Path) -> None:
    shim_config.write_text("[deadlines]\nrestore = 1.5\n")
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            said = restore.result(30)
        assert "1.5 s" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_killed_container_does_not_wait_for_its_restore(ours: Ctr, big: Path) -> None:
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            ours("task", "kill", "-s", "SIGKILL", id, status=None)  # containerd may take it for one without processes
            said = restore.result(30)
        assert "ended: it was killed" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_killed_daemon_during_a_restore_leaves_nothing(ours: Ctr, big: Path) -> None:
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            shim = first("runc").parent()
            assert shim is not None
            kill(shim)
        restore.result()
        eventually(lambda: ours.status(id) == "")


def test_killed_containerd_during_a_restore(ours: Ctr, big: Path) -> None:
    """containerd has forgotten that it asked for the start; whatever it finds, it can remove."""
    containerd = Containerd()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            containerd.kill(signal.SIGKILL)
        restore.result()
        containerd.start()
        containerd.wait_ready()


def test_image_can_be_restored_after_a_failed_attempt(ours: Ctr, big: Path) -> None:
    """What a failed restore had begun does not stand in the way of the next one, of the same id."""
    log = Path(f"/tmp/{ours.new_id('log')}")
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            kill(first("criu"))
        restore.result()
    with restored(ours, big, log=log, container_image=PYTHON, id=id) as witness:
        witness.assert_goes_on()
    log.unlink()


# -- a cgroup that is another's -------------------------------------------------------------------------------------


def test_running_original_is_safe_from_a_restore_into_its_cgroup(ours: Ctr, place: Path) -> None:
    """As `ctr containers restore` asks for, whose new container has the configuration of the old one."""
    with counting(ours) as witness:
        save(ours, witness.id, place)
        cgroup = f"/{ours.namespace}/{witness.id}"
        said = restore_refused(ours, place, "--cgroup", cgroup)
        assert f"processes of another container are in cgroup {cgroup}" in said
        assert str(ours.pid(witness.id)) in said
        witness.assert_goes_on()
        again = place.parent / "again"
        save(ours, witness.id, again, exit=True)
        eventually(lambda: ours.status(witness.id) == "STOPPED")
        with restored(ours, again, log=witness.log, flags=["--cgroup", cgroup]) as back:
            back.assert_goes_on()


def test_of_two_restores_into_one_cgroup_the_second_is_refused(ours: Ctr, big: Path) -> None:
    cgroup = f"/{ours.namespace}/{ours.new_id('both')}"
    with new_id(ours) as id, new_id(ours) as second:
        with held_restore(big, lambda: run(restoring(ours, id, big, "--cgroup", cgroup))) as restore:
            said = refused(*restoring(ours, second, big, "--cgroup", cgroup))
            assert f"another restore into cgroup {cgroup} is in progress" in said
        restore.result()
        assert ours.status(id) == "RUNNING"
