"""A daemon is killed while the OCI runtime is about to dump its container, or has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.lab.node import Containerd
from tests.system.ctr import Ctr
from tests.system.gpu.daemon_killed import (
    IN_DUMP,
    Moment,
    kill_daemon,
    kill_daemon_and_containerd,
    with_and_without_helper,
)


@pytest.mark.parametrize("moment", IN_DUMP, ids=str)
def test_killed_daemon_takes_its_container_along(ctr: Ctr, gpus: Gpus, image: Path, moment: Moment) -> None:
    kill_daemon(ctr, gpus, image, moment)


@with_and_without_helper(IN_DUMP)
def test_report_frees_what_containerd_does_not_end(
    ctr: Ctr, gpus: Gpus, image: Path, containerd: Containerd, moment: Moment, helper: bool
) -> None:
    kill_daemon_and_containerd(ctr, gpus, image, containerd, moment, helper=helper)
