"""What a shell completes: containers, images, operations, tiers and contexts. Silent where no agent answers in time.

A completion is a program that runs while a user waits for a key: it asks the agent once, loads no more than that needs,
and prints nothing but names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kybernate.client import Agent

SECONDS = 2.0  # for the agent's answer
MOST = 200  # names

TIERS = ("ram", "disk", "object")


def a_container(incomplete: str) -> list[str]:
    """Return the names and ids of containers that begin so."""

    def names(agent: Agent) -> Iterator[str]:
        for one in agent.containers():
            if not one.sandbox:
                yield from (one.title, one.id)

    return _beginning(incomplete, names)


def an_image(incomplete: str) -> list[str]:
    """Return the names and ids of images that begin so."""

    def names(agent: Agent) -> Iterator[str]:
        for one in agent.images(limit=MOST):
            yield f"{one.source.namespace}/{one.name}" if one.source.namespace else one.name
            yield from (one.name, one.id)

    return _beginning(incomplete, names)


def an_operation(incomplete: str) -> list[str]:
    """Return the ids of operations that begin so, newest first."""
    return _beginning(incomplete, lambda agent: (one.id for one in agent.operations(limit=MOST)))


def a_running_operation(incomplete: str) -> list[str]:
    """Return the ids of operations that have not ended."""
    return _beginning(
        incomplete, lambda agent: (one.id for one in agent.operations(limit=MOST) if not one.done)
    )  # fmt: skip


def a_tier(incomplete: str) -> list[str]:
    """Return the names of tiers that begin so."""
    return [one for one in TIERS if one.startswith(incomplete)]


def a_context(incomplete: str) -> list[str]:
    """Return the names of contexts that begin so."""
    from kybernate.cli.agents import LOCAL
    from kybernate.client.contexts import ContextsInvalid, load

    with suppress(ContextsInvalid):
        return [one for one in (*sorted(load().by_name), LOCAL) if one.startswith(incomplete)]
    return []


def _beginning(incomplete: str, names: Callable[[Agent], Iterable[str]]) -> list[str]:
    from kybernate.cli.agents import agent_here
    from kybernate.node.failure import Failure

    try:
        agent = agent_here()
        if agent is None:
            return []
        with agent:
            agent.call_seconds = SECONDS
            found = dict.fromkeys(one for one in names(agent) if one.startswith(incomplete))
            return list(found)[:MOST]
    except Failure:
        return []
