"""Calls of the driver that fail, hang or end their caller during a checkpoint: the container computes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import assert_no_image, assert_whole, kybernate, refused
from tests.system.ctr import Ctr, eventually


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("state", "999"), ("state", "crash"),
        ("lock", "999"), ("lock", "hang"), ("lock", "hang-after"), ("lock", "crash"),
        ("checkpoint", "999"), ("checkpoint", "hang"), ("checkpoint", "hang-after"), ("checkpoint", "crash"),
    ],
)  # fmt: skip
def test_failure_on_the_way_out_leaves_the_container_computing(
    ctr: Ctr, gpus: Gpus, image: Path, hasty: None, verb: str, what: str
) -> None:
    with gpu.computing(ctr) as container:
        used = gpus.used()
        gpus.switch(f"{verb}:1:{what}@{ctr.pid(container.id)}")
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert f"CUDA {verb} of process {ctr.pid(container.id)}" in err
        assert "keeps running" in err
        container.computes_on()
        assert gpus.used() == used
        assert_no_image(image)
        kybernate("checkpoint", container.id, f"{image}2")
        container.computes_on()


@pytest.mark.parametrize("what", ["999", "hang", "hang-after", "crash"])
@pytest.mark.parametrize("verb", ["restore", "unlock"])
def test_failure_on_the_way_back_is_made_up_for(
    ctr: Ctr, gpus: Gpus, image: Path, hasty: None, verb: str, what: str
) -> None:
    """The first call fails; the image is complete, and the container computes on by the second."""
    with gpu.computing(ctr) as container:
        used = gpus.used()
        gpus.switch(f"{verb}:1:{what}")
        kybernate("checkpoint", container.id, str(image))
        container.computes_on(seconds=30)
        assert gpus.used() == used
        assert_whole(image)


def test_container_that_cannot_come_back_keeps_its_image_and_can_be_resumed(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr) as container:
        used = gpus.used()
        gpus.switch("restore:*:999")
        err = refused("kybernate", "checkpoint", container.id, str(image))
        assert "kybernate resume" in err
        assert gpus.used() == [0, 0]
        assert_whole(image)
        assert "suspended" in kybernate("status", container.id)
        gpus.switch("")
        kybernate("resume", container.id)
        container.computes_on()
        assert gpus.used() == used


def test_killed_helper_leaves_the_container_computing(ctr: Ctr, gpus: Gpus, image: Path) -> None:
    with gpu.computing(ctr, "/opt/cuda/computes", "2", "20", "0", "1500") as container:
        with gpu.begun("kybernate", "checkpoint", container.id, str(image)) as checkpoint:
            eventually(lambda: container.id and gpu.helpers()[0].children())
            gpu.kill_helpers()
            checkpoint.wait(60)
        container.computes_on(seconds=40)


@pytest.mark.parametrize("switch", ["checkpoint:1:999", "checkpoint:1:hang", "checkpoint:1:hang-after"])
def test_driver_that_fails_leaves_nothing_of_an_image_in_memory(
    ctr: Ctr, gpus: Gpus, memory: Path, hasty: None, switch: str
) -> None:
    image = memory / "image"
    with gpu.computing(ctr) as container:
        used, before = gpus.used(), gpu.open_files(ctr.pid(container.id))
        gpus.switch(f"{switch}@{ctr.pid(container.id)}")
        refused("kybernate", "checkpoint", container.id, str(image))
        container.computes_on()
        assert gpus.used() == used
        assert_no_image(image)
        assert gpu.open_files(ctr.pid(container.id)) == before
        kybernate("checkpoint", container.id, f"{image}2")
        container.computes_on()
        assert assert_whole(Path(f"{image}2")).data_path.why == "the driver wrote into the image itself"
