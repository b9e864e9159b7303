"""How GPUs are connected, from NVML to the groups that seats have on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kybernate.agent.parts.seats import topology_of
from kybernate.seats.groups import groups_of
from tests.contract.cuda_driver.conftest import Use
from tests.fakes.cuda import Gpus

pytestmark = pytest.mark.root


def test_topology_is_what_nvml_reports(gpus: Gpus, use: Callable[[Use], Any]) -> None:
    gpus = Gpus.create(gpus.directory, count=4)
    gpus.connect((0, 2, "NV12"), (1, 3, "NV4"), (0, 1, "PXB"), (2, 3, "NODE"), (0, 3, "PHB"))
    found = topology_of(use(lambda helper: helper.info()))
    assert found.links == (
        ("X", "PXB", "NV12", "PHB"),
        ("PXB", "X", "SYS", "NV4"),
        ("NV12", "SYS", "X", "NODE"),
        ("PHB", "NV4", "NODE", "X"),
    )
    assert [group.name for group in groups_of(found, [1, 2, 4])] == ["G0", "G1", "G2", "G3", "G02", "G13", "G0123"]
