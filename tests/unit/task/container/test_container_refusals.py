"""What is refused in which state of a container, and what must not be left of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kybernate_shim.errors import Missing, Refused, Taken
from tests.unit.task.container.stories import Tell
from tests.unit.task.runtime import EXEC, INIT, Life, settled


def test_running_container_is_not_deleted(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        with pytest.raises(Refused, match="cannot delete a running container"):
            await life.container.delete()

    assert tell(story).runtime.calls == ["create", "start"]


def test_ended_process_is_gone_without_asking_the_runtime(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        life.end(EXEC)
        life.end(INIT)
        for exec_id in ("", "e1"):
            with pytest.raises(Missing, match="process already finished"):
                await life.container.kill(exec_id, 9, all=False)

    assert tell(story).runtime.calls == ["create", "start", "exec e1"]


def test_vanished_exec_is_gone(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        with pytest.raises(
            Missing, match=r"finished|not running|no such process|not found|does not exist|No such file"
        ):
            await life.container.kill("e1", 9, all=False)  # no process of this machine has its pid

    tell(story)


def test_exec_that_was_not_started_takes_no_signal(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.add_exec()
        with pytest.raises(Refused, match="has not been started"):
            await life.container.kill("e1", 9, all=False)

    tell(story)


def test_exec_in_an_ended_container_is_refused(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.add_exec("early")
        life.end(INIT)
        with pytest.raises(Refused, match=r"has ended|cannot"):
            await life.container.execs.start("early")
        with pytest.raises(Refused, match="cannot exec a stopped container"):
            life.add_exec("late")

    tell(story)


def test_exec_ids_are_unique_and_have_to_be_known(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.add_exec()
        with pytest.raises(Taken, match="in container"):
            life.add_exec()
        with pytest.raises(Missing, match="in container"):
            await life.container.execs.start("other")

    tell(story)


def test_paused_container_takes_no_exec_and_can_be_killed(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.pausing.pause()
        with pytest.raises(Refused, match="cannot exec a paused container"):
            life.add_exec()
        await life.container.kill("", 9, all=False)
        assert "kill 9" in life.runtime.calls

    tell(story)


def test_container_that_ends_while_paused_is_thawed(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.pausing.pause()
        life.end(INIT, 137)
        await settled()
        assert life.runtime.calls[-1] == "resume"

    assert tell(story).topics == ["create", "start", "paused", "exit c1"]


def test_exit_in_the_middle_of_a_pause_is_final(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["pause"] = lambda: life.end(INIT, 137)
        await life.container.pausing.pause()
        assert life.container.init.state == "stopped"

    tell(story)


def test_rest_of_a_container_without_its_own_pid_namespace_is_killed(tmp_path: Path) -> None:
    async def story() -> list[str]:
        life = Life(tmp_path, spec={"linux": {"namespaces": [{"type": "mount"}]}})
        await life.run()
        life.end(INIT)
        await settled()
        return life.runtime.calls

    assert asyncio.run(story())[-1] == "kill 9 all"


def test_created_container_that_is_deleted_ends_before_it_is_gone(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.create()
        life.runtime.on["delete"] = lambda: life.end(INIT, 137)
        process = await life.container.delete()
        assert process.state == "deleted"

    assert tell(story).topics == ["create", "exit c1"]


@pytest.mark.parametrize("aborted", [True, False])
def test_kill_that_the_end_of_a_checkpoint_has_forestalled_is_done(tell: Tell, aborted: bool) -> None:
    """What the kill aborts kills the container by itself, so the runtime may find nothing left to signal."""

    def gone() -> None:
        raise Missing("container not running")

    async def story(life: Life) -> None:
        await life.run()
        life.container.operations().abort = lambda: aborted  # type: ignore[method-assign]
        life.runtime.on["kill"] = gone
        await life.container.kill("", 9, all=False)

    if aborted:
        tell(story)
    else:
        with pytest.raises(
            Missing, match=r"finished|not running|no such process|not found|does not exist|No such file"
        ):
            tell(story)
