"""`make demo`, which everyone who comes sees first, says nothing that is not so; and what it shows, with less room."""

from __future__ import annotations

import pytest

from tests.system import demo
from tests.system.ctr import eventually


def test_demo_is_told_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert "nothing is left of it" in capsys.readouterr().out


def test_all_models_come_back_after_a_power_cut_where_one_fits() -> None:
    """Other programs have most of the GPU. The models restore one after the other, asked or not; none loads again."""
    with demo.machine(size=4 * demo.GPU_BYTES) as machine, machine.gpus.occupied(0, leaving=demo.GPU_BYTES):
        machine.up()
        machine.wait_ready(1)
        first = {name: demo.ask(name) for name in demo.MODELS}
        machine.reboot()
        machine.up()
        machine.wait_ready(2)
        eventually(lambda: set(machine.models().values()) == {"asleep"}, seconds=60)
        assert {name: demo.ask(name) for name in demo.MODELS} == first
        machine.reboot()
        machine.up()
        assert {name: demo.ask(name) for name in demo.MODELS} == first  # each is asked while others restore
        machine.wait_ready(3)
        log = machine.log()
        for name in demo.MODELS:
            assert log.count(f"{name}: starting") == 1, log
            assert f"{name}: did not come back" not in log, log
        assert "from zero" not in log
