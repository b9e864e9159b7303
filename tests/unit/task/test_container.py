"""A container's rules: which event follows which, what a failure leaves, and what is refused when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from kybernate_shim.linux.cgroups import Cgroup
from kybernate_shim.oci.runtime import ContainerMissing, ProcessGone, RuntimeFailed
from kybernate_shim.task import container as subject
from kybernate_shim.task.container import ExecExists, ExecNotFound, InitGone, NotStarted
from kybernate_shim.task.lifecycle import InvalidMove
from kybernate_shim.task.stdio import StdioConfig
from kybernate_shim.undo import in_words
from tests.unit.task.runtime import EXEC, INIT, Life, settled

Story = Callable[[Life], Coroutine[Any, Any, None]]
Tell = Callable[[Story], Life]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """Run a story with a container of its own and return the container's life."""

    def run(story: Story, **options: Any) -> Life:
        async def work() -> Life:
            life = Life(tmp_path, **options)
            await asyncio.wait_for(story(life), 10)
            return life

        return asyncio.run(work())

    return run


def failing(verb: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeFailed(verb, "no luck", 1)

    return fail


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- the order of events ----------------------------------------------------------------------------------------------


def test_whole_life_is_told_in_order(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        life.end(EXEC, 3)
        life.end(INIT, 137)
        await life.container.delete_exec("e1")
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
        with pytest.raises(InvalidMove, match="cannot start a stopped container"):
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
            await life.container.start_exec("e1")
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


# -- failures ---------------------------------------------------------------------------------------------------------


def test_failed_create_tells_nothing_and_leaves_nothing(tell: Tell) -> None:
    before = open_descriptors()

    async def story(life: Life) -> None:
        life.runtime.on["create"] = lambda: (life.end(INIT, 1), failing("create")())[0]
        with pytest.raises(RuntimeFailed, match="no luck"):
            await life.create()

    life = tell(story)
    assert life.topics == []
    assert life.runtime.calls == ["create", "delete force"]
    assert open_descriptors() == before


def test_undo_that_fails_too_does_not_hide_why_create_failed(tell: Tell) -> None:
    async def story(life: Life) -> None:
        life.runtime.on["create"] = failing("create")
        life.runtime.on["delete"] = failing("delete")
        with pytest.raises(RuntimeFailed, match="OCI runtime create failed") as caught:
            await life.create()
        assert in_words(caught.value) == (
            "OCI runtime create failed: no luck; not undone: OCI runtime delete failed: no luck"
        )

    tell(story)


def test_what_a_runtime_wrote_in_the_containers_place_is_told(tell: Tell) -> None:
    async def story(life: Life) -> None:
        life.container.init.stdio_config = StdioConfig("", "/dev/null", "/dev/null", terminal=False)

        def fail() -> None:
            stdio = life.container.init.stdio
            assert stdio is not None
            os.write(stdio.fds[2], b"no luck\nthe disk is on fire\n")
            failing("create")()

        life.runtime.on["create"] = fail
        with pytest.raises(RuntimeFailed) as caught:
            await life.create()
        assert in_words(caught.value) == "OCI runtime create failed: no luck; it wrote: the disk is on fire"

    tell(story)


def test_failed_start_leaves_a_container_that_can_be_deleted(tell: Tell) -> None:
    async def story(life: Life) -> None:
        life.runtime.on["start"] = failing("start")
        await life.create()
        with pytest.raises(RuntimeFailed):
            await life.container.start()
        assert life.container.init.state == "created"
        life.runtime.on["delete"] = lambda: life.end(INIT, 137)
        await life.container.delete()

    life = tell(story)
    assert life.topics == ["create", "exit c1"]
    assert life.runtime.calls == ["create", "start", "delete"]


@dataclass
class Frozen:
    """A cgroup that says of itself what it is told, or has no freezer."""

    answer: bool | None

    @property
    def frozen(self) -> bool:
        if self.answer is None:
            raise FileNotFoundError
        return self.answer


@pytest.mark.parametrize(("answer", "told"), [(False, INIT), (True, None), (None, INIT)])
def test_runtime_starts_what_someone_has_frozen(tell: Tell, answer: bool | None, told: int | None) -> None:
    """It refuses to, in words that users know."""

    async def story(life: Life) -> None:
        await life.create()
        life.container.cgroup = cast(Cgroup, Frozen(answer))
        await life.container.start()

    assert tell(story).runtime.waiting == told


def test_exec_that_could_not_be_started_is_still_only_registered(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["exec"] = failing("exec")
        life.add_exec()
        with pytest.raises(RuntimeFailed):
            await life.container.start_exec("e1")
        process = life.container.process("e1")
        assert (process.state, process.pid, process.exit) == ("created", 0, None)
        assert await process.wait() is None  # or its client would wait for ever
        with pytest.raises(NotStarted):
            await life.container.kill("e1", 9, all=False)
        await life.container.delete_exec("e1")
        life.add_exec()  # the id is free again

    assert tell(story).topics == ["create", "start", "exec-added", "exec-added"]


def test_exec_that_could_not_be_started_can_be_started_again(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["exec"] = failing("exec")
        life.add_exec()
        with pytest.raises(RuntimeFailed):
            await life.container.start_exec("e1")
        del life.runtime.on["exec"]
        await life.container.start_exec("e1")
        waiting = asyncio.ensure_future(life.container.process("e1").wait())
        await settled()
        assert not waiting.done()
        life.end(EXEC, 3)
        exit_ = await waiting
        assert exit_ is not None
        assert exit_.status == 3

    assert tell(story).topics[-3:] == ["exec-added", "exec-started", "exit e1"]


def test_failed_pause_leaves_it_running(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["pause"] = failing("pause")
        with pytest.raises(RuntimeFailed):
            await life.container.pause()
        assert life.container.init.state == "running"

    assert tell(story).topics == ["create", "start"]


def test_failed_resume_leaves_it_paused(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.pause()
        life.runtime.on["resume"] = failing("resume")
        with pytest.raises(RuntimeFailed):
            await life.container.resume()
        assert life.container.init.state == "paused"

    assert tell(story).topics == ["create", "start", "paused"]


def test_failed_delete_can_be_repeated(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.end(INIT)
        life.runtime.on["delete"] = failing("delete")
        with pytest.raises(RuntimeFailed):
            await life.container.delete()
        del life.runtime.on["delete"]
        await life.container.delete()
        assert life.container.init.state == "deleted"

    tell(story)


def test_runtime_that_knows_nothing_of_it_is_no_obstacle_to_a_delete(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.end(INIT)

        def missing() -> None:
            raise ContainerMissing("container does not exist")

        life.runtime.on["delete"] = missing
        await life.container.delete()

    tell(story)


def test_exit_that_nobody_saw_is_told_as_killed(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LAST_EXIT_SECONDS", 0)

    async def story(life: Life) -> None:
        await life.create()
        await life.container.delete()

    life = tell(story)
    assert life.topics == ["create", "exit c1"]
    assert life.told[-1][1].exit_status == 137


# -- what is refused --------------------------------------------------------------------------------------------------


def test_running_container_is_not_deleted(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        with pytest.raises(InvalidMove, match="cannot delete a running container"):
            await life.container.delete()

    assert tell(story).runtime.calls == ["create", "start"]


def test_ended_process_is_gone_without_asking_the_runtime(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        life.end(EXEC)
        life.end(INIT)
        for exec_id in ("", "e1"):
            with pytest.raises(ProcessGone, match="process already finished"):
                await life.container.kill(exec_id, 9, all=False)

    assert tell(story).runtime.calls == ["create", "start", "exec e1"]


def test_vanished_exec_is_gone(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.run_exec()
        with pytest.raises(ProcessGone):
            await life.container.kill("e1", 9, all=False)  # no process of this machine has its pid

    tell(story)


def test_exec_that_was_not_started_takes_no_signal(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.add_exec()
        with pytest.raises(NotStarted):
            await life.container.kill("e1", 9, all=False)

    tell(story)


def test_exec_in_an_ended_container_is_refused(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.add_exec("early")
        life.end(INIT)
        with pytest.raises(InitGone):
            await life.container.start_exec("early")
        with pytest.raises(InvalidMove, match="cannot exec a stopped container"):
            life.add_exec("late")

    tell(story)


def test_exec_ids_are_unique_and_have_to_be_known(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.add_exec()
        with pytest.raises(ExecExists):
            life.add_exec()
        with pytest.raises(ExecNotFound):
            await life.container.start_exec("other")

    tell(story)


def test_paused_container_takes_no_exec_and_can_be_killed(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.pause()
        with pytest.raises(InvalidMove, match="cannot exec a paused container"):
            life.add_exec()
        await life.container.kill("", 9, all=False)
        assert "kill 9" in life.runtime.calls

    tell(story)


# -- what must not be left --------------------------------------------------------------------------------------------


def test_container_that_ends_while_paused_is_thawed(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.pause()
        life.end(INIT, 137)
        await settled()
        assert life.runtime.calls[-1] == "resume"

    assert tell(story).topics == ["create", "start", "paused", "exit c1"]


def test_exit_in_the_middle_of_a_pause_is_final(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["pause"] = lambda: life.end(INIT, 137)
        await life.container.pause()
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
