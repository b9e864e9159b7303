"""The steps of a checkpoint: their order, and how each is undone when a later one fails."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kybernate_shim.checkpoint import criu_credentials, criu_images, encrypted
from kybernate_shim.checkpoint import dump as dumping
from kybernate_shim.checkpoint.dump import Dumped, DumpFailed, DumpRequest, dump
from kybernate_shim.checkpoint.image import CheckpointInvalid, TierFull, read_image
from kybernate_shim.checkpoint.manifest import NAME
from kybernate_shim.checkpoint.operation import Operation
from kybernate_shim.checkpoint.staging import TooLittleMemory
from kybernate_shim.trust.keys import KeyUnusable
from kybernate_shim.trust.places import PlaceUntrusted
from tests.unit.checkpoint.fake_target import LOG, FakeAccelerator, FakeTarget


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """A container whose CRIU writes one file."""
    monkeypatch.setattr(criu_images, "processes", lambda image: ())
    monkeypatch.setattr(criu_credentials, "credentials", lambda image: ())
    made = FakeTarget(tmp_path)
    made.children.on["checkpoint"] = writes(made, 0)
    return made


def writes(target: FakeTarget, status: int, log: str = "") -> Any:
    """Return a CRIU that writes an image, and a log, and ends with a status."""

    def act(argv: Sequence[str]) -> int:
        (target.image / "inventory.img").write_bytes(b"inventory")
        (target.work / "dump.log").write_text(log)
        return status

    return act


async def never(argv: Sequence[str]) -> int:
    await asyncio.sleep(3600)
    return 0


async def checkpoint(target: FakeTarget, accelerator: FakeAccelerator | None = None, **request: Any) -> Dumped:
    wanted = DumpRequest(target.image, target.work, **request)
    return await dump(cast(Any, target), wanted, Operation("checkpoint"), LOG, accelerator)


def run(target: FakeTarget, accelerator: FakeAccelerator | None = None, **request: Any) -> Dumped:
    return asyncio.run(checkpoint(target, accelerator, **request))


def test_container_that_goes_on_is_thawed_after_criu(target: FakeTarget) -> None:
    run(target)
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert [file.name for file in read_image(target.image).manifest.files] == [
        "inventory.img",
        "kybernate-spec.json",
    ]


def test_container_does_not_wait_for_the_disk(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = dumping._finish

    def noted(*arguments: Any) -> Dumped:
        target.steps.append("manifest")
        return finish(*arguments)

    monkeypatch.setattr(dumping, "_finish", noted)
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


AWAKE = ["thaw", "bytes back", "attach", "thaw"]


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


def test_failed_criu_is_quoted_and_everything_undone(target: FakeTarget) -> None:
    target.children.on["checkpoint"] = writes(target, 1, "(00.01) Error (criu/x.c:1): no luck\n")
    with pytest.raises(DumpFailed, match=r"goes on as before.*no luck.*work/dump\.log"):
        run(target, FakeAccelerator(target.steps))
    assert target.steps == ["detach", "bytes out", "release", "freeze", "checkpoint", *AWAKE]
    assert not target.image.exists()


def test_log_of_an_earlier_dump_is_not_quoted(target: FakeTarget) -> None:
    target.work.mkdir()
    (target.work / "dump.log").write_text("Error (criu/x.c:1): of yesterday\n")
    target.children.on["checkpoint"] = lambda argv: 1
    with pytest.raises(DumpFailed, match="CRIU left no log"):
        run(target)


def test_container_that_has_ended_is_not_said_to_go_on(target: FakeTarget) -> None:
    def ends(argv: Sequence[str]) -> int:
        target.cgroup.exists = False
        return 1

    target.children.on["checkpoint"] = ends
    with pytest.raises(DumpFailed, match="it has ended"):
        run(target)
    assert target.steps == ["freeze", "checkpoint"]


def test_full_disk_in_the_last_step_does_not_lose_the_container(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dumping, "write_manifest", full)
    with pytest.raises(DumpFailed, match=r"goes on as before.*No space left"):
        run(target, exit=True)
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert not target.image.exists()


def test_small_disk_is_refused_before_anything_is_touched(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumping, "_memory_bytes", lambda target: 1 << 60)
    with pytest.raises(TierFull):
        run(target)
    assert target.steps == []
    assert not target.image.exists()


def test_directory_with_an_image_is_refused_and_kept(target: FakeTarget) -> None:
    first = run(target).manifest
    target.steps.clear()
    with pytest.raises(CheckpointInvalid, match="holds a checkpoint image already"):
        run(target)
    assert target.steps == []
    assert read_image(target.image).manifest == first


def test_failure_takes_only_its_own_files_away(target: FakeTarget) -> None:
    target.image.mkdir(mode=0o700)
    (target.image / "notes.img").write_text("mine")
    target.children.on["checkpoint"] = writes(target, 1)
    with pytest.raises(DumpFailed):
        run(target)
    assert [path.name for path in target.image.iterdir()] == ["notes.img"]


def test_deadline_is_named_and_everything_undone(target: FakeTarget) -> None:
    target.children.on["checkpoint"] = never
    with pytest.raises(TimeoutError, match=r"goes on as before: it had not ended after 1 s"):
        run(target, deadline=1)
    assert target.steps == ["freeze", "checkpoint", "thaw"]
    assert not target.image.exists()


def test_work_directory_in_the_way_leaves_no_image_directory(target: FakeTarget) -> None:
    target.work.write_text("a file")
    with pytest.raises(PlaceUntrusted, match="work: Not a directory"):
        run(target)
    assert target.steps == []
    assert not target.image.exists()


def test_undo_waits_for_a_freeze_that_cannot_be_stopped(target: FakeTarget) -> None:
    """A freeze that ends after the thaw would leave the container frozen for ever."""
    freezing, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        freezing.set()
        assert go_on.wait(10)

    async def cancelled_in_the_freeze() -> None:
        target.cgroup.on_freeze = slow
        task = asyncio.ensure_future(checkpoint(target))
        await asyncio.to_thread(freezing.wait, 10)
        task.cancel()
        asyncio.get_running_loop().call_later(0.02, go_on.set)
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancelled_in_the_freeze())
    assert target.steps == ["freeze", "thaw"]
    assert not target.cgroup.frozen


def test_cancelled_dump_writes_no_manifest_afterwards(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that comes while the image is being finished finds the directory cleared, whatever the thread does."""
    finishing, go_on = threading.Event(), threading.Event()
    finish = dumping._finish

    def slow(*arguments: Any) -> Dumped:
        finishing.set()
        assert go_on.wait(10)
        return finish(*arguments)

    async def cancelled_at_the_end() -> None:
        monkeypatch.setattr(dumping, "_finish", slow)
        target.image.mkdir()
        task = asyncio.ensure_future(checkpoint(target))
        await asyncio.to_thread(finishing.wait, 10)
        task.cancel()
        asyncio.get_running_loop().call_later(0.02, go_on.set)
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancelled_at_the_end())
    assert not (target.image / NAME).exists()
    assert not any(path.suffix == ".img" for path in target.image.iterdir())


# -- Encryption -------------------------------------------------------------------------------------------------------


@pytest.fixture
def encrypting(target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """The same container on a node that encrypts; its directory in memory is `staged`."""
    key = tmp_path / "image.key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    target.config = replace(target.config, encryption_key=key)
    staged = tmp_path / "staged"

    @contextmanager
    def staging(name: str) -> Iterator[Path]:
        staged.mkdir()
        try:
            yield staged
        finally:
            target.steps.append("staging removed")
            shutil.rmtree(staged)

    async def write(argv: Sequence[str]) -> int:
        (staged / "inventory.img").write_bytes(b"inventory")
        assert not any(target.image.iterdir())
        return 0

    encrypt_files = encrypted.encrypt_files

    def noted(*arguments: Any, **options: Any) -> Any:
        target.steps.append("encrypt")
        return encrypt_files(*arguments, **options)

    monkeypatch.setattr("kybernate_shim.checkpoint.staging.staging", staging)
    monkeypatch.setattr(encrypted, "encrypt_files", noted)
    target.children.on["checkpoint"] = write
    return target


def test_container_runs_while_its_image_is_encrypted(encrypting: FakeTarget) -> None:
    run(encrypting)
    assert encrypting.steps == ["freeze", "checkpoint", "thaw", "encrypt", "staging removed"]
    assert {path.name for path in encrypting.image.iterdir()} == {NAME, "inventory.img.enc", "kybernate-spec.json.enc"}
    assert [step.name for step in read_image(encrypting.image).manifest.steps][-1] == "encrypt"


def test_container_that_ends_is_killed_once_its_image_is_encrypted(encrypting: FakeTarget) -> None:
    run(encrypting, exit=True)
    assert encrypting.steps == ["freeze", "checkpoint", "encrypt", "kill with an image", "staging removed"]


def test_nothing_is_left_when_the_disk_is_full_for_the_encrypted_files(
    encrypting: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(encrypted, "encrypt_files", full)
    with pytest.raises(DumpFailed, match="No space left"):
        run(encrypting, exit=True)
    assert not encrypting.image.exists()
    assert encrypting.steps == ["freeze", "checkpoint", "thaw", "staging removed"]


def test_checkpoint_is_refused_without_memory_for_its_plain_files(
    encrypting: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kybernate_shim.checkpoint.staging.available_bytes", lambda: 10 << 20)
    with pytest.raises(TooLittleMemory, match="10 MiB are available: nothing was changed"):
        run(encrypting)
    assert not encrypting.image.exists()
    assert encrypting.steps == ["staging removed"]


def test_unusable_key_refuses_the_checkpoint_before_anything_is_done(encrypting: FakeTarget) -> None:
    assert encrypting.config.encryption_key is not None
    encrypting.config.encryption_key.chmod(0o644)
    with pytest.raises(KeyUnusable, match="nothing was changed"):
        run(encrypting)
    assert not encrypting.image.exists()
    assert encrypting.steps == []
