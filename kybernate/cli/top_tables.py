"""The tables of `kybernate top`: rows and their order, from what the agent has reported. Without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kybernate.cli.ops import done, state_of, subject_of
from kybernate.cli.output import age, moment, printable, size
from kybernate.client.requests import has_ended
from kybernate.client.watching import NodeView
from kybernate.messages import agent_pb2 as wire
from kybernate.node.lookup import gpu_word, shown_gpu, task_word

ENDED_SECONDS = 60.0  # how long an operation is shown after its end
BAR_WIDTH = 16
SORTS = ("name", "state", "size", "age")
Cell = str | float
Sortable = tuple[Cell, ...]


@dataclass(frozen=True)
class Row:
    """A line of a table. `by` has a value for each order of SORTS."""

    key: str
    cells: tuple[str, ...]
    by: Sortable


@dataclass(frozen=True)
class LiveTable:
    """A table of the page: its title, its columns, and what its rows are made of."""

    title: str
    columns: tuple[str, ...]
    rows: Callable[[NodeView, float], list[Row]]

    def sorted(self, view: NodeView, now: float, order: str, *, reverse: bool = False) -> list[Row]:
        """Return the rows in an order of SORTS; rows that are equal by it stand by name."""
        place = SORTS.index(order)
        rows = sorted(self.rows(view, now), key=lambda row: row.by[0])
        return sorted(rows, key=lambda row: row.by[place], reverse=reverse)


def bar(used: int, total: int) -> str:
    """Return a bar of text, such as ████░░░░."""
    full = round(BAR_WIDTH * min(used, total) / total) if total else 0
    return "█" * full + "░" * (BAR_WIDTH - full)


def containers(view: NodeView) -> list[wire.Container]:
    """Return the containers by title; of several runs of one container, those that live, or else the last."""
    by_title: dict[str, list[wire.Container]] = {}
    for one in view.containers():
        if not one.sandbox:
            by_title.setdefault(one.title, []).append(one)
    return [one for _, same in sorted(by_title.items()) for one in _not_ended(same)]


def _not_ended(same: Sequence[wire.Container]) -> list[wire.Container]:
    live = [one for one in same if one.state not in (wire.Container.NO_TASK, wire.Container.STOPPED)]
    return live or [max(same, key=lambda one: moment(one.started))]


def operations(view: NodeView, now: float) -> list[wire.Operation]:
    """Return the operations that run or have ended lately, newest first; `now` is in seconds since 1970."""
    return [one for one in view.operations() if not has_ended(one) or now - moment(one.ended) < ENDED_SECONDS]


def _gpus(view: NodeView, now: float) -> list[Row]:
    return [
        Row(
            one.uuid,
            (
                str(one.index),
                one.model,
                bar(one.used_bytes, one.total_bytes),
                f"{size(one.used_bytes)} of {size(one.total_bytes)}",
                one.uuid,
            ),
            (one.index, one.model, -one.used_bytes, one.index),
        )
        for one in view.gpus()
    ]


def _containers(view: NodeView, now: float) -> list[Row]:
    running = {one.id: one for one in view.operations()}
    return [_container(one, running.get(one.operation), now) for one in containers(view)]


def _container(one: wire.Container, operation: wire.Operation | None, now: float) -> Row:
    words = f"{operation.verb} {operation.progress.step}" if operation is not None else one.operation
    state, begun = task_word(one.state), moment(one.started)
    gpu = shown_gpu(gpu_word(one.gpu), one.parked_bytes)
    return Row(
        f"{one.namespace}/{one.id}",
        (
            printable(one.title),
            state or "no task",
            gpu,
            size(one.vram_bytes) if one.vram_bytes else "",
            age(now - begun) if begun else "",
            words.strip(),
            printable(one.note or one.problem),
        ),
        (one.title, f"{state} {gpu}", -one.vram_bytes, -begun),
    )


def _operations(view: NodeView, now: float) -> list[Row]:
    return [_operation(one, now) for one in operations(view, now)]


def _operation(one: wire.Operation, now: float) -> Row:
    progress, begun = one.progress, moment(one.created)
    moves = progress.total_bytes and not has_ended(one)
    return Row(
        one.id,
        (
            one.verb,
            printable(subject_of(one)),
            state_of(one),
            bar(progress.done_bytes, progress.total_bytes) if moves else "",
            done(progress),
            f"{progress.seconds_left:.0f}s" if progress.seconds_left and not has_ended(one) else "",
            age(now - begun),
            printable(one.error.message) if one.error.message else progress.step,
            one.id,
        ),
        (subject_of(one), state_of(one), -progress.total_bytes, -begun),
    )


def _tiers(view: NodeView, now: float) -> list[Row]:
    return [_tier(one) for one in view.tiers()]


def _tier(one: wire.Tier) -> Row:
    capacity = one.capacity_bytes or one.used_bytes + one.free_bytes
    return Row(
        one.name,
        (
            one.name,
            str(one.images),
            bar(capacity - one.free_bytes, capacity),
            f"{size(one.used_bytes)}, {size(one.free_bytes)} free",
            one.path,
        ),
        (one.name, one.name, -one.used_bytes, one.name),
    )


TABLES = (
    LiveTable("GPUs", ("GPU", "MODEL", "VRAM", "USED", "UUID"), _gpus),
    LiveTable("Containers", ("CONTAINER", "STATE", "GPU", "IN MEMORY", "AGE", "OPERATION", "NOTE"), _containers),
    LiveTable(
        "Operations",
        ("VERB", "OF", "STATE", "PROGRESS", "DONE", "LEFT", "AGE", "STEP", "OPERATION"),
        _operations,
    ),
    LiveTable("Tiers", ("TIER", "IMAGES", "FULL", "USED", "PATH"), _tiers),
)


def heading(node: wire.Node) -> str:
    """Return the first line of the page."""
    memory = node.memory
    words = f"kybernate {node.versions.get('kybernate', '')}  {node.name}".strip()
    words += f"  {size(memory.available_bytes)} of {size(memory.total_bytes)} memory available"
    if memory.arena_bytes:
        words += f"  arena {size(memory.arena_used_bytes)} of {size(memory.arena_bytes)}"
    return printable(words)


def shown(tables: Iterable[LiveTable], view: NodeView, now: float) -> list[tuple[LiveTable, list[Row]]]:
    """Return the tables with their rows, by name, without those that are empty."""
    made = ((one, one.sorted(view, now, "name")) for one in tables)
    return [(one, rows) for one, rows in made if rows]
