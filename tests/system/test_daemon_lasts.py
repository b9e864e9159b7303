"""What many containers cost the daemon of their group: a pod's daemon lives for months."""

from __future__ import annotations

import pytest

from tests.system.checkpoints import shim_of
from tests.system.ctr import Ctr, eventually
from tests.system.leftovers import Snapshot

MEBIBYTE = 1 << 20


@pytest.mark.timeout(900)
def test_three_hundred_containers_leave_their_daemon_as_it_was(ours: Ctr) -> None:
    """All of them share the daemon of one group, as the containers of a pod do."""
    group = ["--annotation", f"io.containerd.runc.v2.group={ours.new_id('group')}"]
    before = Snapshot.take()
    with ours.running("sleep", "1000", flags=group) as id:
        shim = shim_of(ours, id)
        for _ in range(100):  # in which the daemon copies the pages of the fork server that it writes to
            ours.run("true", flags=group)
        fds, memory = shim.num_fds(), shim.memory_full_info().uss
        for number in range(200):
            assert ours.run("echo", str(number), flags=group) == f"{number}\n"
        assert len(Snapshot.take().shims - before.shims) == 1
        eventually(lambda: shim.num_fds() == fds)
        assert shim.memory_full_info().uss < memory + MEBIBYTE
