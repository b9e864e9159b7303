"""`kybernate ops`, `wait` and `cancel`: the operations of the node's agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from kybernate.cli.agents import finished, required_agent, seconds_of
from kybernate.cli.completion import a_running_operation, an_operation
from kybernate.cli.formats import NONE, Format, Output, Table, document_of, rfc3339, show_document, until_interrupted
from kybernate.cli.options import Wait
from kybernate.cli.output import age, echo, moment, seconds, show_columns, show_fields, size
from kybernate.client import Agent, Operation
from kybernate.client.errors import AgentRefused
from kybernate.client.requests import has_ended
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Ambiguous
from kybernate.node.lookup import short_id
from kybernate.node.words import word

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
STATES = {word(wire.OperationState, state): state for state in ALL_STATES}

GONE = "NOT_FOUND"
SEARCHED = 1000  # newest operations, for one whose id begins so
SHOWN = 20

OperationIds = Annotated[
    list[str],
    typer.Argument(
        metavar="OPERATION...", help="Ids of operations, or their beginnings.", show_default=False,
        autocompletion=a_running_operation,
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(ops)
    app.command()(wait)
    app.command()(cancel)


def _state(text: str) -> str:
    if text not in STATES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(STATES)}")
    return text


def ops(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="[OPERATION|CONTAINER]", show_default=False, autocompletion=an_operation,
            help="Id of an operation, for its details; or a container, for the operations on it.",
        ),
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
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print only the newest N.")] = 100,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Continue, and print each change.")] = False,
    output: Output = Format.TABLE,
) -> None:  # fmt: skip
    """List operations, newest first, or show one with its steps.

    An operation is a checkpoint, restore, suspend, resume or swap, or work on an image. It continues when the command
    that began it ends, and when the agent is started again.
    """
    wanted = [STATES[one] for one in state or []]
    with required_agent() as agent:
        found = agent.operations(states=wanted, container=subject, limit=limit)
        if subject and not found and not watch and (one := _operation_or_container(agent, subject)) is not None:
            show_details(one.state, output)
            return
        show([one.state for one in found], output)
        if watch:
            known = {one.id: one.state for one in found}
            _watch(agent, known, lambda one: (not wanted or one.state in wanted) and _is_on(one, subject), output)


def _operation_or_container(agent: Agent, word: str) -> Operation | None:
    """Return the operation that a word means, None where it means a container. Raises AgentRefused for neither."""
    try:
        return operation_of(agent, word)
    except AgentRefused as error:
        if error.code != GONE:
            raise
        try:
            agent.container(word)
        except AgentRefused:
            raise error from None
        return None


def operation_of(agent: Agent, word: str) -> Operation:
    """Return the operation whose id is `word` or begins with it. Raises AgentRefused and Ambiguous."""
    try:
        return agent.operation(word)
    except AgentRefused as error:
        found = [one for one in agent.operations(limit=SEARCHED) if one.id.startswith(word)] if word else []
        if error.code != GONE or not found:
            raise
    if len(found) > 1:
        listed = "\n".join(f"  {one.id}  {one.state.verb}  {subject_of(one.state)}" for one in found[:SHOWN])
        raise Ambiguous(
            f"{word!r} is the beginning of {len(found)} operations:\n{listed}", advice="give more of the id"
        )
    return found[0]


def show_details(one: wire.Operation, format: Format) -> None:
    """Print all that is known of an operation."""
    if show_document(document_of(one), format, one.id):
        return
    result, progress = one.result, one.progress
    show_fields(
        {
            "operation": one.id,
            "verb": one.verb,
            "of": subject_of(one),
            "state": state_of(one),
            "requester": one.requester,
            "created": rfc3339(moment(one.created)) or "",
            "started": rfc3339(moment(one.started)) or "",
            "ended": rfc3339(moment(one.ended)) or "",
            "deadline": rfc3339(moment(one.deadline)) or "",
            "time": seconds(seconds_of(one)) if has_ended(one) and one.HasField("started") else "",
            "step": progress.step if not has_ended(one) else "",
            "done": done(progress) if not has_ended(one) else "",
            "image": result.path or one.image,
            "size": size(result.bytes) if result.bytes else "",
            "frozen": seconds(result.frozen_ms / 1000) if result.frozen_ms else "",
            "VRAM": size(result.vram_bytes) if result.vram_bytes else "",
            "pid": result.pid or "",
            "labels": ",".join(f"{key}={value}" for key, value in sorted(one.labels.items())),
            "note": "; ".join(one.notes),
            "error": one.error.message,
            "type": one.error.type,
            "now": one.error.state,
            "advice": one.error.advice,
        }
    )
    if one.steps:
        echo()
        rows = [(step.name, seconds(step.seconds), size(step.bytes) if step.bytes else "") for step in one.steps]
        show_columns(("STEP", "TIME", "SIZE"), rows)


def wait(
    operations: OperationIds,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Stop waiting after that time.", show_default="no limit")
    ] = 0,
    output: Output = Format.TABLE,
) -> None:
    """Wait until operations have ended.

    Fails when one of them has failed; the exit code is that of the failure.
    """
    end = time.monotonic() + timeout if timeout else None
    with required_agent() as agent:
        ended = []
        for id in operations:
            left = None if end is None else max(0.0, end - time.monotonic())
            ended.append(finished(operation_of(agent, id), left))
    _show_ended(ended, output)


def cancel(
    operations: OperationIds,
    wait: Wait = True,
    output: Output = Format.TABLE,
) -> None:
    """Undo operations: a container keeps running as before, and an unfinished image is removed.

    One that cannot be stopped any more succeeds, and the answer says so.
    """
    with required_agent() as agent:
        asked = [_cancelled(operation_of(agent, id)) for id in operations]
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
        subject_of(one),
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


def subject_of(one: wire.Operation) -> str:
    """Return what an operation is about, in words for a table."""
    name = one.container_title or short_id(one.container) or one.image
    return f"{name} > {short_id(one.other_container)}" if one.other_container else name or NONE


def state_of(one: wire.Operation) -> str:
    """Return the state in lower case."""
    return word(wire.OperationState, one.state)


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
                "container": subject_of(one),
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
