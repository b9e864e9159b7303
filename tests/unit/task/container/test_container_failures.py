"""What a failure of a container's runtime leaves, and which error is reported."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import cast

import pytest

from kybernate_shim.errors import Missing, Refused
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.oci.runtime import RuntimeFailed
from kybernate_shim.task import container as subject
from kybernate_shim.task.stdio import StdioConfig
from kybernate_shim.undo import in_words
from tests.unit.task.container.stories import Tell, failing, open_descriptors
from tests.unit.task.runtime import EXEC, INIT, Life, settled


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
            await life.container.execs.start("e1")
        process = life.container.process("e1")
        assert (process.state, process.pid, process.exit) == ("created", 0, None)
        assert await process.wait() is None  # or its client would wait forever
        with pytest.raises(Refused, match="has not been started"):
            await life.container.kill("e1", 9, all=False)
        await life.container.execs.delete("e1")
        life.add_exec()  # the id is free again

    assert tell(story).topics == ["create", "start", "exec-added", "exec-added"]


def test_exec_that_could_not_be_started_can_be_started_again(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        life.runtime.on["exec"] = failing("exec")
        life.add_exec()
        with pytest.raises(RuntimeFailed):
            await life.container.execs.start("e1")
        del life.runtime.on["exec"]
        await life.container.execs.start("e1")
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
            await life.container.pausing.pause()
        assert life.container.init.state == "running"

    assert tell(story).topics == ["create", "start"]


def test_failed_resume_leaves_it_paused(tell: Tell) -> None:
    async def story(life: Life) -> None:
        await life.run()
        await life.container.pausing.pause()
        life.runtime.on["resume"] = failing("resume")
        with pytest.raises(RuntimeFailed):
            await life.container.pausing.resume()
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
            raise Missing("container does not exist")

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
