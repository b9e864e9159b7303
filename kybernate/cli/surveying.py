"""What the agent knows of containers, in the form of what their shims answer, so that commands print the same."""

from __future__ import annotations

from collections.abc import Iterator

from kybernate.client import Agent
from kybernate.messages import agent_pb2
from kybernate.node.lookup import KnownContainer, gpu_word, task_word
from kybernate.node.survey import SurveyedContainer
from kybernate_shim.messages import shim_pb2 as wire

UNDER_WAY = (agent_pb2.RUNNING, agent_pb2.CANCELLING)


def surveyed(agent: Agent, namespace: str = "") -> list[SurveyedContainer]:
    """Return the containers of Kybernate's shims, sorted by name, each with the operation that runs on it."""
    running = {one.id: one.state for one in agent.operations(states=UNDER_WAY)}
    found = [surveyed_of(one, running.get(one.operation)) for one in agent.containers(namespace) if not one.sandbox]
    return sorted(found, key=lambda seen: (seen.container.namespace, seen.container.title))


def surveyed_one(agent: Agent, name: str, namespace: str = "") -> SurveyedContainer:
    """Return one container with the operation that runs on it. Raises AgentRefused."""
    one = agent.container(name, namespace)
    return surveyed_of(one, agent.operation(one.operation).state if one.operation else None)


def changes(agent: Agent, namespace: str = "") -> Iterator[SurveyedContainer]:
    """Yield each container that changes from now on; one that is gone has the state "deleted"."""
    known: dict[tuple[str, str], agent_pb2.Container] = {}
    listed = False
    for change in agent.watch(["container"]):
        listed = listed or change.bookmark == agent_pb2.BOOKMARK_SNAPSHOT_END
        if not change.HasField("container"):
            continue
        one = change.container
        is_new = known.get((one.namespace, one.id)) != one or change.removed
        known[one.namespace, one.id] = one
        if listed and is_new and not one.sandbox and namespace in ("", one.namespace):
            seen = surveyed_of(one)
            if change.removed and seen.status is not None:
                seen.status.state = "deleted"
            yield seen


def surveyed_of(one: agent_pb2.Container, operation: agent_pb2.Operation | None = None) -> SurveyedContainer:
    """Return a container as a survey has it."""
    container = KnownContainer(
        namespace=one.namespace,
        id=one.id,
        image=one.image,
        runtime=one.runtime,
        pod_namespace=one.pod_namespace,
        pod=one.pod,
        name=one.name,
        state=one.state,
        pid=one.pid,
    )
    if one.problem:
        return SurveyedContainer(container, problem=one.problem)
    status = wire.Container(
        id=one.id,
        state=task_word(one.state),
        pid=one.pid,
        gpu=gpu_word(one.gpu),
        suspended=one.gpu == agent_pb2.Container.SUSPENDED,
        parked_bytes=one.parked_bytes,
        note=one.note,
    )
    if one.arena_bytes:
        status.arena.bytes = one.arena_bytes
    if operation is not None:
        progress = operation.progress
        status.phase, status.step, status.seconds = operation.verb, progress.step, progress.seconds
        status.done_bytes, status.total_bytes = progress.done_bytes, progress.total_bytes
    return SurveyedContainer(container, status)
