"""What all shims of the node are doing: one request to each of them, all concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Failure
from kybernate.node.lookup import KnownContainer
from kybernate.node.shim import NotKybernate, named_kybernate, shim_of, socket_of
from kybernate_shim.messages import shim_pb2 as wire


@dataclass(frozen=True)
class SurveyedContainer:
    """A container of a Kybernate shim. `problem` says why there is no `status`."""

    container: KnownContainer
    status: wire.Container | None = None
    problem: str = ""


async def survey(containers: Iterable[KnownContainer], address: str) -> list[SurveyedContainer]:
    """Return what the shims say about those containers that have a task and are Kybernate's, sorted by name.

    A container that carries the name of our runtime is listed even when its shim does not answer, and one whose record
    containerd cannot send with that as its problem.
    """
    shims: dict[Path, list[KnownContainer]] = {}
    found: list[SurveyedContainer] = []
    for container in containers:
        if container.state == Container.NO_TASK:
            continue
        if container.problem:
            found.append(SurveyedContainer(container, problem=container.problem))
        else:
            shims.setdefault(socket_of(container, address), []).append(container)
    answers = await asyncio.gather(*(_ask(group, address) for group in shims.values()))
    found += [seen for answer in answers for seen in answer]
    return sorted(found, key=lambda seen: (seen.container.namespace, seen.container.title))


async def _ask(group: list[KnownContainer], address: str) -> list[SurveyedContainer]:
    try:
        async with shim_of(group[0], address) as shim:
            await shim.status()  # one that is silent is known sooner than GPUs may be looked at
            status = {found.id: found for found in await shim.status(gpu=True)}
    except NotKybernate:
        return []
    except Failure as error:
        return [SurveyedContainer(container, problem=str(error)) for container in group if named_kybernate(container)]
    return [
        SurveyedContainer(container, status[container.id])
        if container.id in status
        else SurveyedContainer(container, problem="unknown to its shim")
        for container in group
    ]
