"""`kybernate top`: a live page of the node's GPUs, containers, operations and tiers.

What changes comes from the agent's Watch; the page is a pure function of what was seen and of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kybernate.cli.agents import required_agent
from kybernate.cli.formats import moment, until_interrupted
from kybernate.cli.ops import done, state_of, subject_of
from kybernate.cli.output import age, printable, size
from kybernate.client import Agent, AgentUnreachable
from kybernate.client.requests import Backoff, has_ended
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

KINDS = ("container", "gpu", "operation", "tier")
ENDED_SECONDS = 60.0  # how long an operation is shown after its end
BAR_WIDTH = 24
FRAMES = 4.0  # per second
COLOURS = {"running": "green", "suspended": "cyan", "failed": "red", "cancelled": "yellow", "succeeded": "green"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


class Seen:
    """What the agent has reported so far. `trouble` says why it may be old. Used by two threads."""

    def __init__(self, node: wire.Node) -> None:
        self.node = node
        self.trouble = ""
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], wire.Change] = {}
        self._snapshot: dict[tuple[str, str], wire.Change] | None = None  # that is being received

    def take(self, change: wire.Change) -> None:
        """Take over one change; a snapshot replaces all when it is complete."""
        with self._lock:
            if change.bookmark == wire.BOOKMARK_SNAPSHOT_BEGIN:
                self._snapshot = {}
            if (key := _key_of(change)) is not None:
                objects = self._objects if self._snapshot is None else self._snapshot
                objects[key] = change
                if change.removed:
                    del objects[key]
            if change.bookmark == wire.BOOKMARK_SNAPSHOT_END and self._snapshot is not None:
                self._objects, self._snapshot = self._snapshot, None

    def _of(self, kind: str) -> list[wire.Change]:
        with self._lock:
            return [change for (one, _), change in self._objects.items() if one == kind]

    def containers(self) -> list[wire.Container]:
        """Return them by title; of those with one title, such as a container's runs in its pod, without ended ones.

        Where all have ended, it is the last.
        """
        by_title: dict[str, list[wire.Container]] = {}
        for change in self._of("container"):
            by_title.setdefault(change.container.title, []).append(change.container)
        return [one for _, same in sorted(by_title.items()) for one in _not_ended(same)]

    def gpus(self) -> list[wire.Gpu]:
        return sorted((change.gpu for change in self._of("gpu")), key=lambda one: one.index)

    def operations(self, now: float) -> list[wire.Operation]:
        """Return those that run or have ended lately, newest first; `now` is the time in seconds since 1970."""
        found = (change.operation for change in self._of("operation"))
        shown = [one for one in found if not has_ended(one) or now - moment(one.ended) < ENDED_SECONDS]
        return sorted(shown, key=lambda one: one.id, reverse=True)

    def tiers(self) -> list[wire.Tier]:
        return sorted((change.tier for change in self._of("tier")), key=lambda one: one.name)


def _not_ended(same: list[wire.Container]) -> list[wire.Container]:
    live = [one for one in same if one.state not in ("", "stopped")]
    return live or [max(same, key=lambda one: moment(one.started))]


def _key_of(change: wire.Change) -> tuple[str, str] | None:
    match change.WhichOneof("object"):
        case "container":
            return "container", f"{change.container.namespace}/{change.container.id}"
        case "gpu":
            return "gpu", change.gpu.uuid
        case "operation":
            return "operation", change.operation.id
        case "tier":
            return "tier", change.tier.name
        case _:
            return None


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the page one time, for scripts and logs.")] = False,
    seconds: Annotated[
        float, typer.Option("--for", min=0, metavar="SECONDS", help="End after that.", show_default="with Ctrl-C")
    ] = 0,
) -> None:
    """Show the node's GPUs, containers, operations and tiers, and keep the page current."""
    console = Console()
    with required_agent() as agent:
        seen = Seen(agent.node())
        if once or not console.is_terminal:
            _first(agent, seen)
            console.print(page(seen, time.time()))
            return
        threading.Thread(target=_follow, args=(agent, seen), daemon=True).start()
        end = time.monotonic() + seconds if seconds else None
        with until_interrupted(), Live(console=console, screen=True, auto_refresh=False) as live:
            while end is None or time.monotonic() < end:
                live.update(page(seen, time.time()), refresh=True)
                time.sleep(1 / FRAMES)


def _first(agent: Agent, seen: Seen) -> None:
    for change in agent.watch(KINDS):
        seen.take(change)
        if change.bookmark == wire.BOOKMARK_SNAPSHOT_END:
            return


def _follow(agent: Agent, seen: Seen) -> None:
    """Take over changes until the program ends; an agent that is started again is found again."""
    backoff = Backoff()
    revision, instance = 0, ""
    while True:
        try:
            for change in agent.watch(KINDS, revision=revision, instance=instance):
                revision, instance, seen.trouble = change.revision or revision, change.instance, ""
                seen.take(change)
                backoff.reset()
        except AgentUnreachable as error:
            seen.trouble = f"{error}; the page is as of then"
            time.sleep(backoff.MOST)
        except Failure as error:
            seen.trouble = str(error)
            return


def page(seen: Seen, now: float) -> RenderableType:
    """Return the page; `now` is the time in seconds since 1970."""
    operations = seen.operations(now)
    parts: list[RenderableType] = [_head(seen)]
    if gpus := seen.gpus():
        parts.append(_gpus(gpus))
    parts.append(_containers(seen.containers(), {one.id: one for one in operations}))
    if operations:
        parts.append(_operations(operations, now))
    if tiers := seen.tiers():
        parts.append(_tiers(tiers))
    return Group(*parts)


def _head(seen: Seen) -> Text:
    node = seen.node
    memory = f"{size(node.memory.available_bytes)} of {size(node.memory.total_bytes)} memory available"
    text = Text.assemble((f"kybernate {node.versions.get('kybernate', '')}  ", "bold"), f"{node.name}  {memory}")
    if node.memory.arena_bytes:
        text.append(f"  arena {size(node.memory.arena_used_bytes)} of {size(node.memory.arena_bytes)}")
    if seen.trouble:
        text.append(f"\n{printable(seen.trouble)}", "red")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _bar(used: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(used, total), width=BAR_WIDTH)


def _gpus(gpus: Iterable[wire.Gpu]) -> Table:
    table = _table("GPU", "MODEL", "VRAM", "", "UUID")
    for gpu in gpus:
        used = f"{size(gpu.used_bytes)} of {size(gpu.total_bytes)}"
        table.add_row(str(gpu.index), gpu.model, _bar(gpu.used_bytes, gpu.total_bytes), used, gpu.uuid)
    return table


def _containers(containers: Iterable[wire.Container], operations: dict[str, wire.Operation]) -> Table:
    table = _table("CONTAINER", "STATE", "GPU", "VRAM IN MEMORY", "OPERATION", "NOTE")
    for one in containers:
        running = operations.get(one.operation)
        words = f"{running.verb} {running.progress.step}" if running is not None else one.operation
        away = size(one.vram_bytes) if one.vram_bytes else ""
        table.add_row(
            printable(one.title),
            _coloured(one.state),
            _coloured(one.gpu),
            away,
            words,
            printable(one.note or one.problem),
        )
    return table


def _operations(operations: Iterable[wire.Operation], now: float) -> Table:
    table = _table("OPERATION", "OF", "STATE", "STEP", "", "DONE", "LEFT", "AGE")
    for one in operations:
        progress = one.progress
        bar = _bar(progress.done_bytes, progress.total_bytes) if progress.total_bytes and not has_ended(one) else ""
        left = f"{progress.seconds_left:.0f}s" if progress.seconds_left else ""
        begun = age(now - moment(one.created))
        what = printable(one.error.message) if one.error.message else progress.step
        name = f"{one.verb} {one.id}"
        table.add_row(
            name, printable(subject_of(one)), _coloured(state_of(one)), what, bar, done(progress), left, begun
        )
    return table


def _tiers(tiers: Iterable[wire.Tier]) -> Table:
    table = _table("TIER", "IMAGES", "USED", "", "PATH")
    for one in tiers:
        capacity = one.capacity_bytes or one.used_bytes + one.free_bytes
        words = f"{size(one.used_bytes)}, {size(one.free_bytes)} free"
        table.add_row(one.name, str(one.images), _bar(capacity - one.free_bytes, capacity), words, one.path)
    return table


def _coloured(state: str) -> Text:
    return Text(state, COLOURS.get(state, ""))
