"""Carries a verb out in this process, where no agent runs: without a journal, and without waiting for its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kybernate.node.containerd import Containerd
from kybernate.verbs.attempt import Attempt, Streams
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.model import Operation, Report, State
from kybernate.verbs.node import Node
from kybernate.verbs.verb import Verb


def resolved(verb: Verb, address: str) -> Operation:
    """Return the operation that a verb comes to here. Its id is empty: a shim shows it by its verb. Raises Failure."""
    node = _node(address)
    verb.require_valid()
    meant = verb.meant(node)
    return Operation("", meant, meant.resolve(node, ""), created=time.time(), state=State.RUNNING)


def carried_out(
    operation: Operation,
    address: str,
    heard: Callable[[Report], None],
    *,
    seconds: float = 0,
    streams: Streams | None = None,
) -> Operation:
    """Carry an operation out, and return it with its result. `seconds` limits a checkpoint, 0: as configured.

    `streams` are those of a container that is restored, None: into its log. Raises Failure. After KeyboardInterrupt,
    shims continue what they have begun, and a container that was being restored is removed.
    """
    return asyncio.run(_carried_out(operation, _node(address), heard, seconds, streams))


def _node(address: str) -> Node:
    """Return what is known without an agent; containerd may be named through a link, which shims do not know."""
    with Containerd(address) as containerd:
        return Node(containerd.address)


async def _carried_out(
    operation: Operation, node: Node, heard: Callable[[Report], None], seconds: float, streams: Streams | None
) -> Operation:
    assert isinstance(operation.arguments, Verb)
    started = time.time()
    with ThreadPoolExecutor(1) as threads:
        attempt = Attempt(operation, node, heard, threads, seconds=seconds, streams=streams)
        try:
            result = await operation.arguments.execute(attempt)
        except (OperationUndone, OutcomeUnknown) as error:  # of interest to an engine alone: the cause is the fact
            raise error.__cause__ or error from None
    ended = started + result.seconds if result.seconds else time.time()
    return replace(operation, state=State.SUCCEEDED, started=started, ended=ended, result=result, steps=result.steps)
