"""Forked children of a CUDA process that are hard to take its device files from: refused before CRIU is asked."""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.linux.cgroup.cgroup import hierarchy_version
from tests.system import gpu
from tests.system.checkpoints import assert_no_image, assert_whole
from tests.system.ctr import Ctr
from tests.system.gpu.children import EVADES, assert_let_go, ctr, image, try_to_checkpoint  # noqa: F401
from tests.system.gpu.devices import flags

# Children that are hard to take the device files from, and how their checkpoint is refused.
REFUSED = {
    "shares_memory": "keeps running",  # the pretended driver takes it for a process with CUDA state
    "vforked": "keeps running",
    "shares_descriptors": "it shares memory or descriptors with python3[",
    "waits_in_vfork": "did not stop in time: it is frozen or in the kernel. End the process",
    "traced": "is traced by",
}


@pytest.mark.parametrize("child", REFUSED)
def test_child_that_keeps_the_files_is_named_and_left_alone(
    ctr: Ctr, devices: list[str], image: Path, child: str
) -> None:
    with gpu.computing(ctr, *EVADES, child, log=image.parent / "log", flags=flags(devices)) as container:
        said = try_to_checkpoint(container.id, image)
        assert REFUSED[child] in said
        assert_no_image(image)
        container.computes_on()
        assert_let_go(container)


def test_stopped_child_stays_stopped(ctr: Ctr, devices: list[str], image: Path) -> None:
    with gpu.computing(ctr, *EVADES, "stopped", log=image.parent / "log", flags=flags(devices)) as container:
        said = try_to_checkpoint(container.id, image)
        if hierarchy_version() == 1:
            assert "has been stopped by a signal for" in said
            assert_no_image(image)
        else:
            assert not said
        container.computes_on()
        assert_let_go(container, stopped=1)


def test_child_gives_up_what_its_parent_had_for_a_moment(ctr: Ctr, devices: list[str], image: Path) -> None:
    with gpu.computing(ctr, *EVADES, "forked_meanwhile", log=image.parent / "log", flags=flags(devices)) as container:
        assert not try_to_checkpoint(container.id, image)
        assert_whole(image)
        container.computes_on()
        assert_let_go(container)


def test_child_that_flees_by_forking_locks_nothing(ctr: Ctr, devices: list[str], image: Path) -> None:
    with gpu.computing(ctr, *EVADES, "flees", log=image.parent / "log", flags=flags(devices)) as container:
        if try_to_checkpoint(container.id, image):
            assert_no_image(image)
        else:
            assert_whole(image)
        container.computes_on()
        assert_let_go(container)
