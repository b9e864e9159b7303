"""A shim that is killed in the middle of a suspend: containerd ends its container, and the node is as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kybernate_shim.linux import huge_pages
from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import shim_of as daemon_of
from tests.system.ctr import Ctr, eventually


def test_killed_daemon_leaves_nobody_locked(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as other, gpu.computing(ctr) as container:
        pid = ctr.pid(container.id)
        gpus.slow(1000)
        with gpu.begun("kybernate", "suspend", container.id) as suspend:
            eventually(lambda: gpu.noted_as_locked(pid))
            daemon_of(ctr, container.id).kill()
            assert suspend.wait(30)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        eventually(lambda: ctr.status(container.id) == "")
        gpus.slow(0)
        other.computes_on()


def test_killed_shim_leaves_the_nodes_huge_pages_as_they_were(
    ctr: Ctr, gpus: Gpus, settings: Callable[[str], None]
) -> None:
    settings('huge_pages = "node"')
    before = huge_pages.SWITCH.read_text()
    with gpu.computing(ctr) as container:
        gpus.slow(1000)
        with gpu.begun("kybernate", "suspend", container.id) as suspend:
            eventually(lambda: "[always]" in huge_pages.SWITCH.read_text())
            daemon_of(ctr, container.id).kill()
            assert suspend.wait(30)
        eventually(lambda: huge_pages.SWITCH.read_text() == before)
        eventually(lambda: ctr.status(container.id) == "")
