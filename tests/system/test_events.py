"""The event streams of both shims, compared as a whole: not a topic, not a field, not an order may differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.system.ctr import KYBERNATE, STOCK, CommandFailed, Ctr, Events, eventually, run

Told = list[tuple[str, Any]]


def whole_life(ctr: Ctr, id: str) -> None:
    run(ctr.run_argv(id, "sleep", "1000", flags=["-d"]))
    ctr("task", "exec", "--exec-id", "good", id, "true")
    ctr("task", "exec", "--exec-id", "bad", id, "sh", "-c", "exit 3", status=3)
    ctr("task", "pause", id)
    ctr("task", "resume", id)
    ctr("task", "kill", "-s", "SIGKILL", id)
    eventually(lambda: ctr.status(id) == "STOPPED")
    ctr.remove(id)


def end_by_itself(ctr: Ctr, id: str) -> None:
    run(ctr.run_argv(id, "sh", "-c", "exit 7", flags=["--rm"]), status=7)


def death_while_paused(ctr: Ctr, id: str) -> None:
    run(ctr.run_argv(id, "sleep", "1000", flags=["-d"]))
    ctr("task", "pause", id)
    ctr("task", "kill", "-s", "SIGKILL", id)
    ctr("task", "resume", id, status=None)
    eventually(lambda: ctr.status(id) == "STOPPED")
    ctr.remove(id)


def missing_command(ctr: Ctr, id: str) -> None:
    with pytest.raises(CommandFailed):
        run(ctr.run_argv(id, "/no/such/command", flags=["--rm"]))


def missing_command_in_an_exec(ctr: Ctr, id: str) -> None:
    run(ctr.run_argv(id, "sleep", "1000", flags=["-d"]))
    with pytest.raises(CommandFailed):
        ctr("task", "exec", "--exec-id", "bad", id, "/no/such/command")
    ctr.remove(id)


def never_started(ctr: Ctr, id: str) -> None:
    ctr("container", "create", "--runtime", ctr.runtime, ctr.image, id, "sleep", "1000")
    ctr("task", "start", "-d", id)
    ctr.remove(id)


@pytest.mark.parametrize(
    "life",
    [whole_life, end_by_itself, death_while_paused, missing_command, missing_command_in_an_exec, never_started],
    ids=lambda life: life.__name__,
)
def test_stream_is_that_of_the_stock_shim(events: Events, life: Callable[[Ctr, str], None]) -> None:
    ours = stream(events, KYBERNATE, life)
    for _ in range(5):
        stock = stream(events, STOCK, life)
        if stock == ours:
            break  # containerd's own shim at times ends before it has sent its last event, or sends the exit after it
    assert ours == stock


def stream(events: Events, runtime: str, life: Callable[[Ctr, str], None]) -> Told:
    """Return all that is told of one such life under `runtime`, in a form that can be compared."""
    id = Ctr().new_id()
    life(Ctr(runtime=runtime), id)
    last = Ctr().new_id("last")
    run(Ctr().run_argv(last, "true", flags=["--rm"]))  # what comes after it cannot belong to `id` any more
    eventually(lambda: "delete" in events.topics(last))
    return [(topic, comparable(event, id)) for topic, event in events.of(id)]


def comparable(value: Any, id: str) -> Any:
    """Return an event with a word in place of all that differs between two runs of the same shim."""
    if isinstance(value, dict):
        return {key: f"<{key}>" if key in ("pid", "exited_at") else comparable(item, id) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable(item, id) for item in value]
    if isinstance(value, str):
        return re.sub(r"/\d+\b", "/<number>", value.replace(id, "<id>"))
    return value


def test_exit_of_an_exec_comes_before_that_of_init(ctr: Ctr, events: Events) -> None:
    with ctr.running("sleep", "1000") as id:
        for name in ("e1", "e2"):
            ctr("task", "exec", "-d", "--log-uri", "file:///dev/null", "--exec-id", name, id, "sleep", "1000")
        ctr("task", "kill", "-s", "SIGKILL", id)
        eventually(lambda: events.topics(id).count("exit") == 3)
        exits = [event for topic, event in events.of(id) if topic == "/tasks/exit"]
        assert [event["id"] for event in exits[:2]] in (["e1", "e2"], ["e2", "e1"])
        assert exits[2]["id"] == id
        assert {event["exit_status"] for event in exits} == {137}
