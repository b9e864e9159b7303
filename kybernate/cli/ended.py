"""What an operation came to, in the words of a shim's own answers, for commands that print these.

The operation is the agent's, or one that the command itself has carried out: what is printed is the same.
"""

from __future__ import annotations

from kybernate.cli.agents import seconds_of
from kybernate.messages import agent_pb2
from kybernate.node.lookup import KnownContainer
from kybernate_shim.messages import shim_pb2 as wire


def container_of(operation: agent_pb2.Operation) -> KnownContainer:
    """Return what a command prints of the container of an operation."""
    title = operation.container_title
    words = title.split("/") if title != operation.container else []
    pod_namespace, pod, name = words if len(words) == 3 else ("", "", "")
    return KnownContainer(
        operation.namespace,
        operation.container,
        pod_namespace=pod_namespace,
        pod=pod,
        name=name,
        state=agent_pb2.Container.RUNNING,
    )


def checkpointed(ended: agent_pb2.Operation) -> tuple[KnownContainer, wire.CheckpointResponse]:
    """Return the container, and the answer, of a checkpoint."""
    reply = wire.CheckpointResponse(
        path=ended.result.path,
        manifest_digest=ended.result.manifest_digest,
        bytes=ended.result.bytes,
        frozen_ms=ended.result.frozen_ms,
        seconds=seconds_of(ended),
        steps=steps_of(ended),
    )
    return container_of(ended), reply


def suspended(ended: agent_pb2.Operation) -> tuple[KnownContainer, wire.SuspendResponse]:
    """Return the container, and the answer, of a suspend."""
    reply = wire.SuspendResponse(steps=steps_of(ended), vram_bytes=ended.result.vram_bytes, arena=arena_of(ended))
    return container_of(ended), reply


def resumed(ended: agent_pb2.Operation) -> tuple[KnownContainer, wire.ResumeResponse]:
    """Return the container, and the answer, of a resume."""
    return container_of(ended), wire.ResumeResponse(steps=steps_of(ended), vram_bytes=ended.result.vram_bytes)


def arena_of(ended: agent_pb2.Operation) -> wire.Arena:
    """Return what a suspend, or that of a swap, got of the arena."""
    got, reasons = ended.result.arena_bytes, ended.result.arena_reasons
    return wire.Arena(asked=bool(got or reasons), bytes=got, reasons=reasons)


def steps_of(operation: agent_pb2.Operation) -> list[wire.Step]:
    """Return the steps of an operation in the form of the shim's answers."""
    return [
        wire.Step(name=step.name, seconds=step.seconds, bytes=step.bytes, spared_bytes=step.spared_bytes)
        for step in operation.steps
    ]
