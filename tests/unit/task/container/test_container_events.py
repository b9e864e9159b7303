"""Which event of a container follows which."""

from __future__ import annotations

import asyncio

import pytest

from kybernate_shim.errors import Refused
from kybernate_shim.oci.runtime import RuntimeFailed
from tests.unit.task.container.stories import Tell, failing
from tests.unit.task.runtime import EXEC, INIT, Life, settled


def test_whole_life_is_told_in_order(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        life.end(EXEC, 3)
        life.end(INIT, 137)
        await life.container.execs.delete("e1")
        init = await life.container.delete()
        assert init.exit is not None
        assert (init.pid, init.exit.status) == (INIT, 137)

    life = tell(story)
    assert life.topics == ["create", "start", "exec-added", "exec-started", "exit e1", "exit c1"]
    assert [event.pid for topic, event in life.told if topic != "exec-added"] == [INIT, INIT, EXEC, EXEC, INIT]
    assert [event.exit_status for topic, event in life.told if topic == "exit"] == [3, 137]


def test_exit_event_waits_for_the_start_event(tell: Tell) -> None:
    async def story(life: Life) -> None:
        life.runtime.on["start"] = lambda: life.end(INIT)
        await life.run()
        assert life.container.init.state == "stopped"

    assert tell(story).topics == ["create", "start", "exit c1"]


def test_init_that_ends_before_create_returns_is_told_as_created_and_ended(tell: Tell) -> None:
    async def story(life: Life) -> None:
        life.runtime.on["create"] = lambda: life.end(INIT, 1)
        await life.create()
        with pytest.raises(Refused, match="cannot start a stopped container"):
            await life.container.start()
        await life.container.delete()

    assert tell(story).topics == ["create", "exit c1"]


def test_exec_that_ends_before_exec_returns_is_told_as_started_and_ended(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["exec"] = lambda: life.end(EXEC)
        await life.run_exec()

    assert tell(story).topics[2:] == ["exec-added", "exec-started", "exit e1"]


def test_exit_of_init_waits_for_those_of_its_execs(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        life.end(INIT, 137)
        assert life.container.init.state == "running"
        life.end(EXEC, 137)
        assert life.container.init.state == "stopped"

    assert tell(story).topics[-2:] == ["exit e1", "exit c1"]


def test_exit_of_init_waits_for_an_exec_that_is_being_started(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["exec"] = lambda: (life.end(INIT, 137), failing("exec")())[0]
        life.add_exec()
        with pytest.raises(RuntimeFailed):
            await life.container.execs.start("e1")
        assert life.container.init.state == "stopped"

    assert tell(story).topics == ["create", "start", "exec-added", "exit c1"]


def test_state_is_final_when_a_wait_returns(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.create()
        waiting = asyncio.ensure_future(life.container.init.wait())  # containerd waits before it starts
        await life.container.start()
        await settled()
        assert not waiting.done()
        life.end(INIT, 5)
        exit_ = await waiting
        assert exit_ is not None
        assert (exit_.status, life.container.init.state) == (5, "stopped")

    tell(story)


def test_pid_is_known_after_the_end(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.end(INIT)
        await life.container.delete()
        assert life.container.init.pid == INIT

    tell(story)
