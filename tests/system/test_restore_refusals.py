"""Images and containers that a restore refuses, by name and before anything is changed."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from kybernate.messages import cri_config_pb2
from kybernate_shim.checkpoint.image.manifest import ManifestInvalid
from tests.system.checkpoints import (
    COUNT,
    MANIFEST,
    PROMPTLY,
    counting,
    kybernate,
    refused,
    restored,
    save,
)
from tests.system.cri import Cri
from tests.system.ctr import BUSYBOX, Ctr, run
from tests.system.leftovers import Snapshot, assert_nothing_left
from tests.system.restore_images import good, place, restore_refused  # noqa: F401  # fixtures
from tests.system.tenants import close_to_others, pods_place, sign_for


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
        assert cri.state(id) == "CONTAINER_RUNNING"
    cri.close()


@pytest.mark.parametrize("key", ["restore-form", "restore_from", "restore", "Restore-From", "restor-from.c"])
def test_misspelt_wish_of_a_pod_starts_no_container_and_leaves_nothing(good: Path, key: str) -> None:
    wrong = {f"kybernate.io/{key}": good.name}
    with Cri() as cri, cri.pod(annotations=wrong) as pod:
        before = Snapshot.take()
        id = cri.create(pod, "c", ["sleep", "1000"], annotations=wrong)
        with pytest.raises(grpc.RpcError, match=r"did you mean kybernate\.io/restore-from.*correct the annotation"):
            cri.start(id)
        cri.remove(id)
        assert_nothing_left(before)


def test_misspelt_wish_of_roots_container_is_refused(ours: Ctr) -> None:
    said = refused(*ours.run_argv(ours.new_id(), "true", flags=["--annotation", "kybernate.io/restore-form=x"]))
    assert "did you mean kybernate.io/restore-from?" in said


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
