"""Images that this node has no copy of, as the agent's registry knows them, in the list of those that it has."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import Any

from kybernate.cli.agents import agent_or_none
from kybernate.cli.formats import NONE, moment
from kybernate.cli.output import age, size
from kybernate.cli.registered import is_named
from kybernate.client import Agent
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure

WORD = "elsewhere"  # the state of such an image


def images_elsewhere(here: Set[str], namespace: str, names: Sequence[str]) -> list[wire.Image]:
    """Return the images without a copy in one of the directories `here`; none where no agent answers."""
    with agent_or_none() as agent:
        try:
            return _of(agent, here, namespace, names) if agent is not None else []
        except Failure:
            return []  # the list of what is here does not depend on it


def _of(agent: Agent, here: Set[str], namespace: str, names: Sequence[str]) -> list[wire.Image]:
    found = [one for one in agent.images(namespace=namespace) if _is_elsewhere(one, agent.node().name, here)]
    return [one for one in found if not names or any(is_named(one, name) for name in names)]


def _is_elsewhere(one: wire.Image, node: str, here: Set[str]) -> bool:
    return not any(replica.node == node or replica.place in here for replica in one.replicas)


def row(one: wire.Image) -> tuple[str, ...]:
    """Return an image as the table of `kybernate images` has it."""
    return (
        one.name,
        one.source.namespace or NONE,
        f"{one.source.pod}/{one.source.container}" if one.source.pod else one.source.container[:12] or NONE,
        size(one.bytes),
        age(time.time() - moment(one.created)),
        NONE,
        ", ".join((WORD, *_places(one))),
    )


def document(one: wire.Image) -> dict[str, Any]:
    """Return an image as `kybernate images --json` has those of the node. Its signature is examined when it is here."""
    return {
        "name": one.name,
        "namespace": one.source.namespace,
        "path": one.replicas[0].place if one.replicas else "",
        "pod": one.source.pod,
        "container": one.source.container,
        "bytes": one.bytes,
        "time": one.created.ToJsonString(),
        "key": "",
        "signature": None,
        "usable": False,
        "states": [WORD, *_places(one)],
        "reason": "",
    }


def _places(one: wire.Image) -> list[str]:
    """Return the nodes, or the tier of the object store, that have the image."""
    return sorted({replica.node or replica.tier for replica in one.replicas})
