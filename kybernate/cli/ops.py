"""`kybernate ops`, `wait` and `cancel`: the operations of the node's agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from kybernate.cli.agents import finished, required_agent, seconds_of
from kybernate.cli.formats import (
    NONE,
    Format,
    Output,
    Table,
    document_of,
    moment,
    until_interrupted,
)
from kybernate.cli.output import age, seconds, show_fields, size
from kybernate.client import Agent, Operation
from kybernate.client.requests import has_ended
from kybernate.messages import agent_pb2 as wire
from kybernate.node.lookup import short_id

HEADER = (
    "OPERATION",
    "VERB",
    "CONTAINER",
    "STATE",
    "STEP",
    "DONE",
    "LEFT",
    "AGE",
    "TIME",
    "IMAGE",
    "REQUESTER",
    "ERROR",
)
NARROW = 8
ALL_STATES = (wire.PENDING, wire.RUNNING, wire.CANCELLING, wire.SUCCEEDED, wire.FAILED, wire.CANCELLED)
STATES = {wire.OperationState.Name(state).lower(): state for state in ALL_STATES}

OperationIds = Annotated[
    list[str], typer.Argument(metavar="OPERATION...", help="Ids, as `kybernate ops` lists them.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(ops)
    app.command()(wait)
    app.command()(cancel)


def _state(text: str) -> str:
    if text not in STATES:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(STATES)}")
    return text


def ops(
    container: Annotated[
        str, typer.Argument(metavar="[CONTAINER]", help="Only those on this container.", show_default=False)
    ] = "",
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            callback=lambda given: [_state(one) for one in given or []],
            help=f"Only those in this state: {', '.join(STATES)}. May be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The newest N.")] = 100,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Continue, and print each change.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List the operations of the agent, newest first.

    An operation is a checkpoint, restore, suspend, resume or swap, or work on an image. It continues when the command
    that began it ends, and when the agent is started again.
    """
    wanted = [STATES[one] for one in state or []]
    with required_agent() as agent:
        found = agent.operations(states=wanted, container=container, limit=limit)
        show([one.state for one in found], output)
        if watch:
            known = {one.id: one.state for one in found}
            _watch(agent, known, lambda one: (not wanted or one.state in wanted) and _is_on(one, container), output)


def wait(
    operations: OperationIds,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Give up waiting after that.", show_default="no limit")
    ] = 0,
    output: Output = Format.TABLE,
) -> None:
    """Wait until operations have ended; fails when one of them has failed."""
    end = time.monotonic() + timeout if timeout else None
    with required_agent() as agent:
        ended = []
        for id in operations:
            left = None if end is None else max(0.0, end - time.monotonic())
            ended.append(finished(agent.operation(id), left))
    _show_ended(ended, output)


def cancel(
    operations: OperationIds,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is undone.")] = True,
    output: Output = Format.TABLE,
) -> None:
    """Undo operations: a container keeps running as before, and an unfinished image is removed.

    One that cannot be stopped any more succeeds, and the answer says so.
    """
    with required_agent() as agent:
        asked = [_cancelled(agent.operation(id)) for id in operations]
        if wait:
            for one in asked:
                for _ in one.follow():
                    pass
    _show_ended([one.state for one in asked], output)


def _cancelled(operation: Operation) -> Operation:
    operation.cancel()
    return operation


def show(operations: Iterable[wire.Operation], format: Format) -> None:
    """Print a list of operations."""
    TABLE.show(format, list(operations))


def row(one: wire.Operation, now: float | None = None) -> tuple[str, ...]:
    """Return the line of an operation in a table, with all columns; `now` is the time in seconds since 1970."""
    now = time.time() if now is None else now
    ended = has_ended(one)
    return (
        one.id,
        one.verb,
        subject(one),
        state_of(one),
        one.progress.step or NONE,
        done(one.progress) or NONE,
        f"{one.progress.seconds_left:.0f}s" if one.progress.seconds_left and not ended else NONE,
        age(now - moment(one.created)),
        seconds(seconds_of(one)) if ended and one.HasField("started") else NONE,
        one.result.path or one.image or NONE,
        one.requester or NONE,
        one.error.message or NONE,
    )


def subject(one: wire.Operation) -> str:
    """Return what an operation is about, in words for a table."""
    name = one.container_title or short_id(one.container) or one.image
    return f"{name} > {short_id(one.other_container)}" if one.other_container else name or NONE


def state_of(one: wire.Operation) -> str:
    """Return the state in small letters."""
    return wire.OperationState.Name(one.state).lower()


def done(progress: wire.Progress) -> str:
    """Return how far the running step is, in words; empty where it moves nothing."""
    if not progress.total_bytes:
        return size(progress.done_bytes) if progress.done_bytes else ""
    return f"{size(progress.done_bytes)} of {size(progress.total_bytes)}"


def _show_ended(operations: list[wire.Operation], format: Format) -> None:
    if format in (Format.JSON, Format.YAML, Format.NAME):
        show(operations, format)
        return
    for one in operations:
        show_fields(
            {
                "operation": one.id,
                "verb": one.verb,
                "container": subject(one),
                "state": state_of(one),
                "image": one.result.path,
                "time": seconds(seconds_of(one)) if one.HasField("started") else "",
                "note": "; ".join(one.notes),
                "error": one.error.message,
            }
        )


def _is_on(one: wire.Operation, container: str) -> bool:
    named = (one.container, one.container_title, one.other_container)
    return not container or any(name == container or name.startswith(container) for name in named if name)


def _watch(
    agent: Agent, known: dict[str, wire.Operation], wanted: Callable[[wire.Operation], bool], format: Format
) -> None:
    """Print operations as they change from the `known` states on."""
    with until_interrupted():
        for change in agent.watch(["operation"]):
            one = change.operation
            if change.HasField("operation") and not change.removed and wanted(one) and known.get(one.id) != one:
                TABLE.show_change(format, one)


TABLE = Table(HEADER, row, document_of, NARROW, lambda one: one.id)
