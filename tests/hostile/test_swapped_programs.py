"""A tenant's programs stand in the way while their container changes places on a GPU with another tenant's.

Each swap ends in success or in words. The neighbour computes in the end, whatever has become of the swaps, and the
container that attacks is as before.
"""

# ruff: noqa: F811  # pytest finds fixtures by the names of parameters
from __future__ import annotations

import pytest

from kybernate_shim.gpu.helper_client import log_path
from tests import users
from tests.fakes.cuda import Gpus
from tests.hostile.test_gpu_programs import DEADLINE, ROUNDS, ROWS, Row, attacking, ended
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import Ctr
from tests.system.gpu.conftest import ctr, gpus, hasty, node  # noqa: F401  # fixtures
from tests.system.gpu.node import SOCKET, helpers

ROOM = "5"  # seconds for which a container may wait for the other one's memory


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_swaps_end_and_the_neighbour_computes_afterwards(ctr: Ctr, gpus: Gpus, hasty: None, row: Row) -> None:
    (helper,) = helpers()
    log_begins = len(log_path(SOCKET).read_text())
    with gpu.computing(ctr) as neighbour:
        with attacking(ctr, row, users.UID) as one:
            kybernate("suspend", neighbour.id)
            for out, back in ((one.id, neighbour.id), (neighbour.id, one.id)) * ROUNDS:
                print(row.name, ended("swap", out, back, "--room-timeout", ROOM))
            for id in (neighbour.id, one.id):
                print(row.name, ended("resume", id, "--timeout", str(DEADLINE)))  # it may be there already
            neighbour.computes_on()
            one.assert_goes_on()
        neighbour.computes_on()
        assert helpers() == [helper]
        assert "Traceback" not in log_path(SOCKET).read_text()[log_begins:]
