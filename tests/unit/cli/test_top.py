"""`kybernate top`: its page at two sizes, its keys, and an agent that goes away and comes back.

The screens are kept as text in screens/; `KYBERNATE_WRITE_SCREENS=1` writes them again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kybernate.cli.top_page import KINDS, TopPage, following
from kybernate.cli.top_tables import TABLES, containers, operations, shown
from kybernate.client import Agent
from kybernate.client.watching import NodeView, Position
from kybernate.messages import agent_pb2 as wire
from tests.fakes.agent import FakeAgent
from tests.unit.cli.test_agent_commands import at

SCREENS = Path(__file__).parent / "screens"
SIZES = {"80x24": (80, 24), "200x50": (200, 50)}
NOW = 1_800_000_000.0
GIB = 1 << 30
NODE = wire.Node(
    name="node-1",
    versions={"kybernate": "1.0"},
    memory=wire.HostMemory(available_bytes=96 * GIB, total_bytes=128 * GIB),
)


def changes() -> list[wire.Change]:
    """Return what the agent of a busy node reports."""
    gpus = [
        wire.Gpu(index=n, model="NVIDIA H100", uuid=f"GPU-{n}", total_bytes=80 * GIB, used_bytes=n * 40 * GIB)
        for n in range(2)
    ]
    busy = [
        wire.Container(
            namespace="k8s.io", id=f"c{n}", title=f"team/model-{n}/main", started=at(NOW - 60 * n),
            state="PAUSED" if n % 3 == 1 else "RUNNING", gpu="SUSPENDED" if n % 3 == 1 else "ATTACHED",
            vram_bytes=(9 - n) * GIB if n % 3 == 1 else 0, operation="op-1" if n == 1 else "",
        )
        for n in range(1, 9)
    ]  # fmt: skip
    running = wire.Operation(
        id="op-1", verb="resume", container_title="team/model-1/main", state=wire.RUNNING, created=at(NOW - 5),
        progress=wire.Progress(step="copy", done_bytes=2 * GIB, total_bytes=8 * GIB, seconds_left=15),
    )  # fmt: skip
    failed = wire.Operation(
        id="op-0", verb="checkpoint", container_title="team/model-2/main", state=wire.FAILED, created=at(NOW - 20),
        ended=at(NOW - 10), error=wire.Error(message="the disk is full"),
    )  # fmt: skip
    tiers = [
        wire.Tier(
            name="disk", path="/var/lib/kybernate/checkpoints", images=7, used_bytes=60 * GIB, free_bytes=40 * GIB
        ),
        wire.Tier(name="ram", path="/run/kybernate/memory", images=2, used_bytes=8 * GIB, free_bytes=24 * GIB),
    ]
    return [
        wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_BEGIN),
        *(wire.Change(gpu=one) for one in gpus),
        *(wire.Change(container=one) for one in busy),
        *(wire.Change(operation=one) for one in (failed, running)),
        *(wire.Change(tier=one) for one in tiers),
        wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END, revision=9, instance="one"),
    ]


def page(reported: list[wire.Change] | None = None) -> TopPage:
    """Return the page of a node, of which all is known."""

    def follow(view: NodeView, note: Callable[[str], None]) -> None:
        for change in changes() if reported is None else reported:
            view.take(change)

    return TopPage(NODE, follow, clock=lambda: NOW)


def text_of(app: TopPage) -> str:
    """Return what a user sees."""
    strips = app.screen._compositor.render_strips()
    return "".join(f"{''.join(segment.text for segment in strip).rstrip()}\n" for strip in strips)


async def drawn(pilot: Pilot[None], *keys: str) -> str:
    """Press keys, and return the screen when all that was reported is on it."""
    app = pilot.app
    assert isinstance(app, TopPage)
    await asyncio.to_thread(lambda: [one.join(10) for one in threading.enumerate() if one.name == app.FOLLOWER])
    app.draw()
    for key in keys:
        await pilot.press(key)
    await pilot.pause()
    await pilot.pause()
    return text_of(app)


def screen(size: tuple[int, int], *keys: str) -> str:
    async def run() -> str:
        async with page().run_test(size=size) as pilot:
            return await drawn(pilot, *keys)

    return asyncio.run(run())


@pytest.mark.parametrize("keys", [(), ("question_mark",), ("z",), ("pagedown",)], ids=["page", "help", "size", "down"])
@pytest.mark.parametrize("size", SIZES)
def test_screen_is_the_one_that_is_kept(size: str, keys: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    kept, now = SCREENS / f"{name}.txt", screen(SIZES[size], *keys)
    if os.environ.get("KYBERNATE_WRITE_SCREENS"):
        kept.write_text(now)
    assert now == kept.read_text()


def test_everything_is_on_the_large_screen_and_keys_on_the_small_one() -> None:
    large = screen(SIZES["200x50"])
    for words in ("NVIDIA H100", "team/model-8/main", "the disk is full", "/run/kybernate/memory"):
        assert words in large
    small = screen(SIZES["80x24"])
    assert "q Quit" in small
    assert all(len(line) <= 80 for line in small.splitlines())
    assert len(small.splitlines()) == 24
    assert "24.0 GiB free" in screen(SIZES["80x24"], "pagedown")


def test_keys_sort_and_reverse() -> None:
    async def run() -> list[list[str]]:
        async with page().run_test(size=(200, 50)) as pilot:
            return [order(await drawn(pilot, key)) for key in ("n", "r", "r", "z", "a")]

    def order(text: str) -> list[str]:
        return [line.split("/")[1] for line in text.splitlines() if line.strip().startswith("team/")]

    by_name, reversed_, _, by_size, by_age = asyncio.run(run())
    assert by_name == [f"model-{n}" for n in range(1, 9)]
    assert reversed_ == by_name[::-1]
    assert by_size[:3] == ["model-1", "model-4", "model-7"]
    assert by_age == by_name


def test_q_ends_and_help_is_shown_and_hidden() -> None:
    async def run() -> tuple[str, str, bool]:
        app = page()
        async with app.run_test(size=(80, 24)) as pilot:
            first, second = await drawn(pilot, "question_mark"), await drawn(pilot, "question_mark")
            await pilot.press("q")
            await pilot.pause()
            return first, second, app.is_running

    with_help, without, runs = asyncio.run(run())
    assert "reverse the order" in with_help
    assert "reverse the order" not in without
    assert not runs


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    directory = Path(tempfile.mkdtemp(prefix="a"))
    agent = FakeAgent(directory / "agent.sock")
    yield agent
    agent.stop()
    shutil.rmtree(directory)


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_page_keeps_what_it_knew_while_the_agent_is_away_and_follows_it_again(agent: FakeAgent) -> None:
    view, troubles = NodeView(), [""]
    agent.changes = changes()
    with Agent(str(agent.socket)) as client:
        threading.Thread(target=following(client), args=(view, troubles.append), daemon=True).start()
        until(lambda: len(view.containers()) == 8)
        agent.stop()
        until(lambda: "no agent answers" in troubles[-1])
        assert len(view.containers()) == 8
        agent.changes = [
            wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_BEGIN),
            wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END, revision=1, instance="two"),
        ]
        agent.start()
        until(lambda: not view.containers())
        assert troubles[-1] == ""
    watches = [one for one in agent.requests if isinstance(one, wire.WatchRequest)]
    assert (watches[0].revision, list(watches[0].kinds)) == (0, list(KINDS))
    assert (watches[-1].revision, watches[-1].instance) == (9, "one")


def test_position_is_that_of_the_last_numbered_change() -> None:
    position = Position()
    position.take(wire.Change(revision=3, instance="a"))
    position.take(wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END, instance="a"))
    assert (position.revision, position.instance) == (3, "a")


# -- what is known, without a terminal --------------------------------------------------------------------------------


def test_container_is_shown_once_whatever_runs_it_had() -> None:
    view = NodeView()
    for id, state, begun in [("one", "STOPPED", 10), ("two", "NO_TASK", 20), ("three", "RUNNING", 30)]:
        change = wire.Container(id=id, title="team-a/web-0/web", state=state, started=at(begun))
        view.take(wire.Change(container=change))
    assert [one.id for one in containers(view)] == ["three"]
    view.take(wire.Change(container=wire.Container(id="three", title="team-a/web-0/web"), removed=True))
    assert [one.id for one in containers(view)] == ["two"]
    for namespace in ("a", "b"):
        view.take(wire.Change(container=wire.Container(id="c", namespace=namespace, title="c", state="RUNNING")))
    assert len(containers(view)) == 3


def test_snapshot_replaces_all_when_it_is_complete() -> None:
    view = NodeView()
    view.take(wire.Change(container=wire.Container(id="old", title="old")))
    view.take(wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_BEGIN))
    view.take(wire.Change(container=wire.Container(id="new", title="new")))
    assert [one.id for one in view.containers()] == ["old"]
    view.take(wire.Change(bookmark=wire.BOOKMARK_SNAPSHOT_END))
    assert [one.id for one in view.containers()] == ["new"]


def test_ended_operation_is_shown_for_a_minute() -> None:
    view = NodeView()
    view.take(wire.Change(operation=wire.Operation(id="op-1", state=wire.FAILED, ended=at(100))))
    assert [one.id for one in operations(view, 159)] == ["op-1"]
    assert operations(view, 161) == []
    assert shown(TABLES, view, 161) == []
