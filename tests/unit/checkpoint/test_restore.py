"""The steps of a restore: what is checked before anything is touched, and what is left after a failure."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kybernate_shim.checkpoint import restore
from kybernate_shim.checkpoint.cleanup import Traces
from kybernate_shim.checkpoint.compat import read_host
from kybernate_shim.checkpoint.criu import confined
from kybernate_shim.checkpoint.criu.config import explain
from kybernate_shim.checkpoint.criu.confined import Inspection
from kybernate_shim.checkpoint.image.locate import locate
from kybernate_shim.checkpoint.image.manifest import File, GpuMemory, Manifest, Program, Source
from kybernate_shim.checkpoint.image.requested import wanted_image
from kybernate_shim.checkpoint.image.store import CheckpointInvalid, Image, write_manifest
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.restore import Prepared, RestoreFailed, prepare, run
from kybernate_shim.checkpoint.rootfs.diff import NAME as ROOTFS_DIFF
from kybernate_shim.config import Config
from kybernate_shim.errors import Failed, Refused
from kybernate_shim.linux import threads
from kybernate_shim.linux.cgroup.cgroup import hierarchy_version
from kybernate_shim.oci.spec import Spec
from kybernate_shim.trust.requester import NODE
from tests.unit.checkpoint.fake_target import LOG, FakeTarget

CONTENT = b"content"
NOTHING = Inspection((1,), (), internet_sockets=False)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """A container whose root filesystem and remains are only noted."""
    made = FakeTarget(tmp_path)
    made.image.mkdir()
    monkeypatch.setattr(confined, "examine", lambda directory: NOTHING)
    monkeypatch.setattr(restore, "apply_diff", lambda diff, rootfs, **limits: made.steps.append("rootfs") or Applied())
    monkeypatch.setattr(Traces, "clear_restore", lambda traces: made.steps.append("clear"))
    return made


class Applied:
    bytes = len(CONTENT)


def image_of(target: FakeTarget, **changes: Any) -> Image:
    (target.image / ROOTFS_DIFF).write_bytes(CONTENT)
    digest = f"blake2b:{hashlib.blake2b(CONTENT, digest_size=32).hexdigest()}"
    manifest = Manifest(
        id="i",
        time="2026-01-02T03:04:05Z",
        source=Source("c"),
        runtime=Program("runc", "1.3.0"),
        criu=Program("criu", "4.2"),
        host=read_host(hierarchy_version()),
        files=(File(ROOTFS_DIFF, len(CONTENT), digest),),
    )
    manifest = replace(manifest, **changes)
    write_manifest(target.image, manifest, durable=False)
    return Image(target.image, manifest)


def prepared(target: FakeTarget, image: Image) -> Prepared:
    return asyncio.run(prepare(cast(Any, target), image, Operation("restore"), LOG, work=target.work))


def test_matching_image_is_brought_into_the_rootfs(target: FakeTarget) -> None:
    ready = prepared(target, image_of(target))
    assert target.steps == ["rootfs"]
    assert ready.criu.image_path == target.image
    assert ready.criu.work_path == target.work


def test_changed_byte_is_found_before_anything_is_touched(target: FakeTarget) -> None:
    image = image_of(target)
    (target.image / ROOTFS_DIFF).write_bytes(b"cOntent")
    with pytest.raises(CheckpointInvalid, match=r"rootfs-diff\.tar: changed.*Nothing was restored"):
        prepared(target, image)
    assert target.steps == []


def test_other_architecture_is_refused_before_anything_is_touched(target: FakeTarget) -> None:
    image = image_of(target, host=replace(read_host(hierarchy_version()), architecture="s390x"))
    with pytest.raises(Refused, match="s390x"):
        prepared(target, image)
    assert target.steps == []


def test_refused_restore_leaves_no_directory_of_its_own(target: FakeTarget) -> None:
    image = image_of(target, host=replace(read_host(hierarchy_version()), architecture="s390x"))
    for attempt in ("none", "empty", "with a log"):
        if attempt != "none":
            target.work.mkdir(mode=0o700, exist_ok=True)
        if attempt == "with a log":
            (target.work / "helper.log").touch()
        with pytest.raises(Refused, match="Nothing was restored"):
            prepared(target, image)
        assert target.work.exists() is (attempt != "none")  # what was there is not ours to remove


@pytest.mark.parametrize(("force", "taken"), [("true", True), ("yes", False), (None, False)])
def test_risk_is_taken_by_force_alone(target: FakeTarget, force: str | None, taken: bool) -> None:
    image = image_of(target, runtime=Program("crun", "1.20"))
    target.spec = Spec({"annotations": {"kybernate.io/force": force} if force else {}})
    if taken:
        prepared(target, image)
        assert target.steps == ["rootfs"]
    else:
        with pytest.raises(Refused, match="made with crun"):
            prepared(target, image)
        assert target.steps == []


def test_node_may_forbid_force(tmp_path: Path, target: FakeTarget) -> None:
    image = image_of(target, runtime=Program("crun", "1.20"))
    target.spec = Spec({"annotations": {"kybernate.io/force": "true"}})
    target.config = replace(target.config, annotations=("kybernate.io/tcp",))
    with pytest.raises(Refused, match="Nothing was restored"):
        prepared(target, image)


def test_cuda_plugin_is_refused_before_anything_is_touched(tmp_path: Path, target: FakeTarget) -> None:
    (tmp_path / "cuda_plugin.so").touch()
    target.config = replace(target.config, criu_libdir=tmp_path)
    prepared(target, image_of(target))
    target.steps.clear()
    with pytest.raises(Refused, match="would load"):
        prepared(target, image_of(target, cuda_processes=(GpuMemory(1, 0),)))
    assert target.steps == []


def restored(target: FakeTarget) -> None:
    ready = prepared(target, image_of(target))
    target.steps.clear()
    asyncio.run(run(cast(Any, target), ready, Operation("restore"), cast(Any, None), fds={}, console=None))


def test_restore_that_succeeds_clears_nothing(target: FakeTarget) -> None:
    restored(target)
    assert target.steps == ["restore"]


def fails(target: FakeTarget) -> Any:
    def act(argv: Sequence[str]) -> int:
        (target.work / "restore.log").write_text("(00.01) 1: Error (criu/x.c:1): no luck\n")
        return 1

    return act


def test_failed_restore_is_cleared_away_before_the_runtime_forgets_it(target: FakeTarget) -> None:
    target.children.on["restore"] = fails(target)
    with pytest.raises(RestoreFailed, match=r"nothing is left of it.*no luck.*work/restore\.log"):
        restored(target)
    assert target.steps == ["restore", "clear", "delete"]


def test_what_cannot_be_cleared_away_is_named(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(traces: Traces) -> None:
        raise Failed("process 7 does not end")

    monkeypatch.setattr(Traces, "clear_restore", stays)
    target.children.on["restore"] = fails(target)
    with pytest.raises(RestoreFailed, match=r"not all of it could be removed \(process 7 does not end\)"):
        restored(target)


@pytest.mark.parametrize(
    ("annotations", "env", "wanted"),
    [
        ({}, [], ""),
        ({}, ["RESTORE_FROM=/a"], "/a"),
        ({"kybernate.io/restore-from": "/b"}, ["RESTORE_FROM=/a"], "/b"),
        ({"kybernate.io/restore-from": "name"}, [], "/var/lib/kybernate/checkpoints/name"),
        (
            {
                "kybernate.io/restore-from": "/b",
                "kybernate.io/restore-from.one": "/c",
                "io.kubernetes.cri.container-name": "one",
            },
            [],
            "/c",
        ),
        ({"kybernate.io/restore-from": "/b", "io.kubernetes.cri.container-type": "sandbox"}, [], ""),
    ],
)
def test_container_says_what_it_is_restored_from(annotations: dict[str, str], env: list[str], wanted: str) -> None:
    found = wanted_image(Spec({"annotations": annotations, "process": {"env": env}}), Config())
    assert (str(locate(found, NODE, Config())) if found else "") == wanted


@pytest.mark.parametrize(
    ("annotation", "source", "container", "restored"),
    [
        ("kybernate.io/restore-from", "app", "app", True),
        ("kybernate.io/restore-from", "app", "init", False),
        ("kybernate.io/restore-from", "", "init", True),  # of no pod
        ("kybernate.io/restore-from.web", "app", "web", True),  # said of that container alone
    ],
)
def test_image_of_a_pod_is_for_its_own_container(annotation: str, source: str, container: str, restored: bool) -> None:
    notes = {annotation: "/b", "io.kubernetes.cri.container-name": container}
    found = wanted_image(Spec({"annotations": notes}), Config())
    assert found is not None
    assert found.is_for(container, source) is restored


@pytest.mark.parametrize("name", ["match_mounts", "apply_diff", "make_mount_points", "_make_names"])
def test_restore_ends_at_its_deadline_whatever_it_waits_for(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0.01)
    reading, writing = os.pipe()
    standing, ended = threading.Event(), threading.Event()

    def stand(*_: Any, **__: Any) -> None:
        standing.set()
        try:
            os.read(reading, 1)  # as in a volume whose server does not answer
        finally:
            ended.set()

    async def story() -> None:
        image = image_of(target)
        monkeypatch.setattr(restore, name, stand)
        for deadline in (0.2, 5.0, 60.0):  # a busy machine needs longer until it comes to the step
            operation = Operation("restore")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(deadline + 60), operation.within(deadline):
                    await prepare(cast(Any, target), image, operation, LOG, work=target.work)
            if standing.is_set():
                break

    asyncio.run(story())
    assert standing.is_set()
    os.write(writing, b"x")
    assert ended.wait(10)
    for fd in (reading, writing):
        os.close(fd)


FAILED = "restore failed: criu failed: Error (criu/cr-restore.c:2331): Restoring FAILED."
CGROUPD = "Error (criu/cgroup.c:2055): cg: cgroupd: recv req error: No such file or directory (whole log: /l)"
KILLED = "Error (criu/cr-restore.c:1269): 16479 killed by signal 9: Killed"


@pytest.mark.parametrize(
    ("message", "memory"),
    [
        (f"{FAILED}; {CGROUPD}", True),
        (f"{FAILED}; {KILLED}; {CGROUPD}", True),
        (f"{FAILED}; Error (criu/files-reg.c:1): Can't open; {KILLED}; {CGROUPD}", False),
        ("restore failed: runc: not found (CRIU left no log at /l)", False),
    ],
)
def test_processes_that_are_killed_in_the_middle_may_lack_memory(message: str, memory: bool) -> None:
    assert ("where a memory limit does not suffice" in restore._advised(message)) == memory


def test_log_of_a_restore_that_lacked_memory_is_understood(tmp_path: Path) -> None:
    """As CRIU 4.2 has written it, with 100 MiB of memory and a limit of 40."""
    (tmp_path / "restore.log").write_text(
        "(00.005247) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
        "(00.266600) Error (criu/cr-restore.c:1269): 16479 killed by signal 9: Killed\n"
        "(00.270514) Warn  (criu/cr-restore.c:2318): Unable to wait 16479: No child processes\n"
        "(00.271827) Error (criu/cr-restore.c:2331): Restoring FAILED.\n"
        "(00.284855) Error (criu/cgroup.c:2055): cg: cgroupd: recv req error: No such file or directory\n"
    )
    message = explain("restore of container c failed: criu failed: type RESTORE errno 0", tmp_path / "restore.log")
    assert "where a memory limit does not suffice" in restore._advised(message)
