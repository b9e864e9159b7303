"""How long a container is frozen by its checkpoint, where its image goes to a disk that is slower than memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.checkpoint.freeze_limit import ANY
from kybernate_shim.messages.shim_pb2 import CheckpointResponse
from kybernate_shim.run_directory import DUMPS
from kybernate_shim.ttrpc import RpcError
from tests.fakes.slow_filesystem import SlowFilesystem, slow_filesystem
from tests.system.checkpoints import (
    assert_no_image,
    assert_whole,
    failure_of,
    holding,
    in_background,
    in_the_middle,
    kybernate,
    restored,
    save,
)
from tests.system.ctr import Ctr

MIB = 384
RATE = 96 << 20  # bytes a second


@dataclass
class SlowDisk:
    """A directory on a slow filesystem; images are made in it."""

    place: Path
    filesystem: SlowFilesystem


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    place, backing = tmp_path / "disk", tmp_path / "backing"
    place.mkdir()
    backing.mkdir(mode=0o700)
    with slow_filesystem(place, backing, RATE) as filesystem:
        yield SlowDisk(place, filesystem)


def seconds_of(reply: CheckpointResponse) -> dict[str, float]:
    return {step.name: step.seconds for step in reply.steps}


def test_container_runs_while_a_slow_disk_takes_its_image(ours: Ctr, disk: SlowDisk) -> None:
    image = disk.place / "image"
    with holding(ours, MIB) as witness:
        reply = save(ours, witness.id, image)
        writing = seconds_of(reply)["write"]
        assert reply.frozen_ms / 1000 < writing, "the container was frozen while the disk wrote"
        assert not list(DUMPS.glob("*")), "memory stays in use"
        witness.assert_goes_on()
        manifest = assert_whole(image)
        assert manifest.frozen_ms == reply.frozen_ms
        assert manifest.bytes > MIB << 20
    with restored(ours, image, log=witness.log, container_image="localhost:5000/python:latest") as again:
        again.assert_goes_on()


def test_container_is_frozen_as_long_as_the_disk_writes_where_there_is_no_memory(
    ours: Ctr, disk: SlowDisk, shim_config: Path
) -> None:
    with holding(ours, MIB) as witness:
        in_memory = save(ours, witness.id, disk.place / "in-memory")
        shim_config.write_text("dump_memory = 0")
        direct = save(ours, witness.id, disk.place / "direct")
        witness.assert_goes_on()
    assert "write" not in seconds_of(direct)
    assert direct.frozen_ms > 1000 * (MIB << 20) / RATE > in_memory.frozen_ms


@pytest.mark.parametrize(
    "request_", [{"exit": True, "max_freeze_seconds": 1}, {"max_freeze_seconds": 0.001}], ids=["disk", "memory"]
)
def test_checkpoint_that_cannot_keep_to_its_limit_is_refused_before_the_freeze(
    ours: Ctr, disk: SlowDisk, request_: dict[str, Any]
) -> None:
    with holding(ours, MIB) as witness:
        with pytest.raises(RpcError, match=r"would freeze container .* that the request allows.*Nothing was changed"):
            save(ours, witness.id, disk.place / "image", **request_)
        assert_no_image(disk.place / "image")
        witness.assert_goes_on()


@pytest.mark.parametrize("exit_", [False, True], ids=["leave-running", "exit"])
def test_checkpoint_that_exceeds_its_limit_is_undone(ours: Ctr, disk: SlowDisk, shim_config: Path, exit_: bool) -> None:
    shim_config.write_text("dump_memory = 0\nmax_freeze = 6")
    image = disk.place / "image"
    with holding(ours, MIB // 4) as witness:
        with in_background(lambda: save(ours, witness.id, image, exit=exit_)) as dump:
            in_the_middle(image, 1)
            disk.filesystem.rate = 1 << 20
            error = failure_of(dump)
            disk.filesystem.rate = float("inf")
        assert "was undone: it had been frozen for" in error
        assert "`max_freeze` of the node" in error
        assert_no_image(image)
        witness.assert_goes_on()
        save(ours, witness.id, image, max_freeze_seconds=ANY)
        assert_whole(image)


def test_annotation_of_the_container_limits_its_freeze(ours: Ctr, disk: SlowDisk) -> None:
    flags = ["--annotation", "kybernate.io/max-freeze=1ms"]
    with holding(ours, MIB, flags=flags) as witness:
        with pytest.raises(RpcError, match=r"the 0\.001 s that the annotation kybernate\.io/max-freeze allows"):
            save(ours, witness.id, disk.place / "image")
        printed = kybernate("checkpoint", witness.id, str(disk.place / "image"), "--max-freeze", "none")
        assert "frozen:" in printed
        assert "frozen:" in kybernate("inspect", str(disk.place / "image"))
        witness.assert_goes_on()
