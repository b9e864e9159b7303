"""The verbs of containers through the agent: what an operation came to, in the words of the shim's own answers.

So a command prints the same, with and without an agent.
"""

from __future__ import annotations

from kybernate.cli.agents import finished, seconds_of
from kybernate.cli.output import echo
from kybernate.client import Operation
from kybernate.messages import agent_pb2
from kybernate.node.lookup import KnownContainer
from kybernate_shim.messages import shim_pb2 as wire


def begun(operation: Operation) -> None:
    """Print the id of an operation that is not waited for."""
    echo(operation.id)


def container_of(operation: agent_pb2.Operation) -> KnownContainer:
    """Return what a command prints of the container of an operation."""
    title = operation.container_title
    words = title.split("/") if title != operation.container else []
    pod_namespace, pod, name = words if len(words) == 3 else ("", "", "")
    return KnownContainer(
        operation.namespace, operation.container, pod_namespace=pod_namespace, pod=pod, name=name, state="running"
    )


def checkpointed(operation: Operation) -> tuple[KnownContainer, wire.CheckpointResponse]:
    """Wait for a checkpoint. Raises as `finished`."""
    ended = finished(operation)
    reply = wire.CheckpointResponse(
        path=ended.result.path,
        manifest_digest=ended.result.manifest_digest,
        bytes=ended.result.bytes,
        frozen_ms=ended.result.frozen_ms,
        seconds=seconds_of(ended),
        steps=steps_of(ended),
    )
    return container_of(ended), reply


def suspended(operation: Operation) -> tuple[KnownContainer, wire.SuspendResponse]:
    """Wait for a suspend. Raises as `finished`."""
    ended = finished(operation)
    result = ended.result
    arena = wire.Arena(
        asked=bool(result.arena_bytes or result.arena_reasons), bytes=result.arena_bytes, reasons=result.arena_reasons
    )
    reply = wire.SuspendResponse(steps=steps_of(ended), vram_bytes=result.vram_bytes, arena=arena)
    return container_of(ended), reply


def resumed(operation: Operation) -> tuple[KnownContainer, wire.ResumeResponse]:
    """Wait for a resume. Raises as `finished`."""
    ended = finished(operation)
    return container_of(ended), wire.ResumeResponse(steps=steps_of(ended), vram_bytes=ended.result.vram_bytes)


def steps_of(operation: agent_pb2.Operation) -> list[wire.Step]:
    """Return the steps of an operation in the form of the shim's answers."""
    return [
        wire.Step(name=step.name, seconds=step.seconds, bytes=step.bytes, spared_bytes=step.spared_bytes)
        for step in operation.steps
    ]
