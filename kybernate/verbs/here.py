"""Carries a verb out in this process, where no agent runs: without a journal, and without waiting for its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kybernate.verbs.attempt import Attempt
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.model import Operation, Report, State
from kybernate.verbs.node import Node
from kybernate.verbs.verb import Verb


def resolved(verb: Verb, address: str) -> Operation:
    """Return the operation that a verb comes to here. Its id is empty: a shim shows it by its verb. Raises Failure."""
    node = Node(address)
    verb.require_valid()
    meant = verb.meant(node)
    return Operation("", meant, meant.resolve(node, ""), created=time.time(), state=State.RUNNING)


def carried_out(operation: Operation, address: str, heard: Callable[[Report], None], seconds: float = 0) -> Operation:
    """Carry an operation out, and return it with its result. `seconds` limits a checkpoint, 0: as configured.

    Raises Failure. After KeyboardInterrupt, shims continue what they have begun.
    """
    return asyncio.run(_carried_out(operation, Node(address), heard, seconds))


async def _carried_out(operation: Operation, node: Node, heard: Callable[[Report], None], seconds: float) -> Operation:
    assert isinstance(operation.arguments, Verb)
    started = time.time()
    with ThreadPoolExecutor(1) as threads:
        attempt = Attempt(operation, node, heard, threads, seconds=seconds)
        try:
            result = await operation.arguments.execute(attempt)
        except (OperationUndone, OutcomeUnknown) as error:  # of interest to an engine alone: the cause is the fact
            raise error.__cause__ or error from None
    return replace(
        operation, state=State.SUCCEEDED, started=started, ended=time.time(), result=result, steps=result.steps
    )
