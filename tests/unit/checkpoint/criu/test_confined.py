"""CRIU's images are read in a process with limits: what harms their reader harms nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate_shim.checkpoint.criu import confined
from kybernate_shim.checkpoint.criu import images as criu_images
from kybernate_shim.checkpoint.criu.confined import Inspection, ReaderLimits, inspect, inspecting
from kybernate_shim.checkpoint.criu.images import COMMON, DumpedMount
from kybernate_shim.errors import Damaged
from kybernate_shim.linux.children import Child, Children
from kybernate_shim.messages import criu_pb2 as criu
from tests.unit.checkpoint.criu.test_criu_images import write

SMALL = ReaderLimits(memory=64 << 20, processor_seconds=2, seconds=20)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write(tmp_path / "pstree.img", (COMMON, criu_images.PSTREE), criu.Process(pid=1).SerializeToString())
    mount = criu.Mount(type=5, id=2, parent=1, mountpoint="/dev", root="/", flags=1)
    write(tmp_path / "mountpoints-9.img", (COMMON, criu_images.MOUNTS), mount.SerializeToString())
    write(tmp_path / "files.img", (COMMON, criu_images.FILES), criu.File(type=4, id=1).SerializeToString())
    return tmp_path


def read(directory: Path, limits: ReaderLimits = SMALL) -> Inspection:
    async def inspected() -> Inspection:
        children = Children()
        children.attach(asyncio.get_running_loop())
        return await inspect(children, directory, limits)

    return asyncio.run(inspected())


def refusal(directory: Path, limits: ReaderLimits = SMALL) -> str:
    with pytest.raises(Damaged) as refused:
        read(directory, limits)
    return str(refused.value)


def misbehaving(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    monkeypatch.setattr(confined, "examine", lambda directory, privileges: act())


def test_what_the_images_say_is_returned(images: Path) -> None:
    dev = DumpedMount("/dev", "tmpfs", "", "/", 2, 1, writable=False)
    assert read(images) == Inspection(pids=(1,), mounts=(dev,), internet_sockets=True, root_writable=False)


def test_damaged_image_is_named(images: Path) -> None:
    (images / "files.img").write_bytes(b"no image")
    assert "files.img: not the CRIU image that its name indicates" in refusal(images)


@pytest.mark.parametrize("name", ["pstree.img", "files.img", "mountpoints-1.img"])
def test_fifo_and_link_are_refused(images: Path, name: str) -> None:
    (images / name).unlink(missing_ok=True)
    os.mkfifo(images / name)
    assert f"{name}: not a regular file" in refusal(images)
    (images / name).unlink()
    (images / name).symlink_to("/dev/zero")
    assert f"{name}: not a regular file" in refusal(images)


def test_zeros_are_refused_by_their_size(images: Path) -> None:
    os.truncate(images / "mountpoints-9.img", 400 << 20)
    assert "larger than 67108864 bytes" in refusal(images)


def test_entries_without_end_are_refused(images: Path) -> None:
    os.truncate(images / "mountpoints-9.img", 8 << 20)  # zeros are empty entries
    assert "more than 16384 entries" in refusal(images)


def test_namespaces_without_end_are_refused(images: Path) -> None:
    for number in range(criu_images.MOST_NAMESPACES):
        write(images / f"mountpoints-1{number}.img", (COMMON, criu_images.MOUNTS))
    assert "more than 1024 namespaces" in refusal(images)


def test_path_without_end_is_refused(images: Path) -> None:
    write(
        images / "mountpoints-9.img",
        (COMMON, criu_images.MOUNTS),
        criu.Mount(mountpoint="/x" * 4096).SerializeToString(),
    )
    assert "a path of more than 4096 characters" in refusal(images)


def test_reader_that_takes_memory_is_refused_it(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehaving(monkeypatch, lambda: bytearray(1 << 30))
    assert "cannot be read with 64 MiB of memory" in refusal(images)


def test_reader_that_computes_is_ended(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehaving(monkeypatch, lambda: [None for _ in iter(int, 1)])
    assert "1 s of CPU time" in refusal(images, replace(SMALL, processor_seconds=1))


def test_reader_that_waits_is_ended(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehaving(monkeypatch, lambda: time.sleep(600))
    assert "were not read within 0.05 s" in refusal(images, replace(SMALL, seconds=0.05))


def test_reader_that_fails_in_an_unknown_way_is_a_damaged_image(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehaving(monkeypatch, lambda: 1 // 0)
    assert "status 1" in refusal(images)


@pytest.mark.parametrize("answer", [{}, [], {"pids": [-1], "mounts": [], "internet_sockets": False}, "x" * (9 << 20)])
def test_answer_is_believed_in_its_form_alone(images: Path, monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    misbehaving(monkeypatch, lambda: answer)
    assert refusal(images)


def test_reader_has_no_descriptor_of_ours(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = os.memfd_create("secret")

    def steal() -> Inspection:
        return Inspection((len(os.listdir("/proc/self/fd")),), (), internet_sockets=False)  # noqa: PTH208

    misbehaving(monkeypatch, steal)
    found = read(images)
    os.close(secret)
    assert found.pids == (5,)  # 0 to 2, the answer, the directory that is listed


def test_cancelled_caller_leaves_no_reader(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehaving(monkeypatch, lambda: time.sleep(600))

    async def cancelled() -> None:
        children = Children()
        children.attach(asyncio.get_running_loop())
        task = asyncio.ensure_future(inspect(children, images, SMALL))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["pstree.img", "files.img", "mountpoints-9.img"]),
    content=st.binary(max_size=300),
    headed=st.booleans(),
)
def test_any_bytes_are_read_or_refused(images: Path, name: str, content: bytes, headed: bool) -> None:
    whole = images / name
    before = whole.read_bytes()
    whole.write_bytes(before[:8] + content if headed else content)
    try:
        confined.examine(images)
    except Damaged:
        pass
    finally:
        whole.write_bytes(before)


def test_image_that_root_chose_is_read_without_a_copy(images: Path) -> None:
    class Forbidden:
        def fork(self, work: Callable[[], int]) -> Child:
            raise AssertionError("a copy was made")

    async def looked() -> Inspection:
        async with inspecting(Forbidden(), images) as reading:
            return await reading

    assert asyncio.run(looked()) == read(images)
