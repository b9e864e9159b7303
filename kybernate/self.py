"""For a program inside a container: have the own container checkpointed, or suspended while it is idle.

    import kybernate.self

    for step in range(steps):
        train(step)
        if step % 1000 == 0:
            saved = kybernate.self.checkpoint()
            if saved.restored:
                print("running again from", saved.image)

The container needs the agent's restricted socket, which the node's administrator mounts, and can do this to itself
alone: the agent finds the container by the calling process, and no argument names one.

A checkpoint fails while one of the container's processes is connected to a program outside of it. So no connection is
kept while the agent works: its state is asked for now and then, over a connection of a few milliseconds.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from kybernate.client.errors import (
    AgentRefused,
    AgentUnreachable,
    NotFinished,
    require_success,
    translated,
)
from kybernate.client.requests import duration, has_ended, options
from kybernate.client.target import OPTIONS
from kybernate.messages import agent_pb2 as wire
from kybernate.messages import agent_pb2_grpc

DEFAULT_SOCKET = "/run/kybernate/self/agent.sock"
VARIABLE = "KYBERNATE_SELF"
CALL_SECONDS = 20.0
POLL_SECONDS = 1.0

__all__ = ["Saved", "checkpoint", "container", "suspend_when_idle"]


@dataclass(frozen=True)
class Saved:
    """What became of a checkpoint: `image` is its name, `restored` says whether this process came out of it."""

    image: str
    restored: bool


def container() -> wire.Container:
    """Return what the agent knows of the own container. Raises AgentUnreachable and AgentRefused."""
    with _connected() as stub:
        return stub.GetSelf(wire.GetSelfRequest(), timeout=CALL_SECONDS)


def checkpoint(*, exit: bool = False, timeout: float = 600) -> Saved:
    """Write an image of the own container, and return when it is complete: here, or in the restored container.

    With `exit`, the container ends with its image complete, so this returns only where it is restored. Raises
    OperationFailed, NotFinished after `timeout` seconds, AgentUnreachable, and AgentRefused. After a failure the
    container runs as before.
    """
    key = str(uuid.uuid4())
    with _connected() as stub:
        before = stub.GetSelf(wire.GetSelfRequest(), timeout=CALL_SECONDS)
        request = wire.SelfCheckpointRequest(exit=exit, options=options(key, 0, None))
        operation = stub.Checkpoint(request, timeout=CALL_SECONDS)
    end = time.monotonic() + timeout
    while True:
        time.sleep(POLL_SECONDS)
        try:
            with _connected() as stub:
                now = stub.GetSelf(wire.GetSelfRequest(), timeout=CALL_SECONDS)
                if _task(now) != _task(before):
                    return Saved(_name(now.restored_from), restored=True)
                operation = stub.GetOperation(wire.GetOperationRequest(id=operation.id), timeout=CALL_SECONDS)
        except (AgentUnreachable, AgentRefused):
            # The agent is being started again, or does not know the restored container yet.
            if time.monotonic() >= end:
                raise
        if has_ended(operation):
            return Saved(_name(require_success(operation).result.path), restored=False)
        if time.monotonic() >= end:  # asked last: the clock of the node of a restore is another one
            raise NotFinished(f"operation {operation.id} (checkpoint) has not ended after {timeout:g} s")


def suspend_when_idle(idle: float = 60.0) -> str:
    """Let the agent suspend the container once it has been idle for `idle` seconds; return the operation's id.

    Idle is: no call of this module, and no work of the container's processes on a GPU, as far as NVML's samples show.

    Returns immediately. The VRAM comes back with `kybernate resume`, or by whatever wakes the container. Raises
    AgentUnreachable and AgentRefused.
    """
    request = wire.SuspendWhenIdleRequest(idle=duration(idle), options=options("", 0, None))
    with _connected() as stub:
        return stub.SuspendWhenIdle(request, timeout=CALL_SECONDS).id


def _name(image: str) -> str:
    """Return the name of an image from its directory."""
    return image.rpartition("/")[2]


def _task(found: wire.Container) -> tuple[str, int]:
    """Return what distinguishes one task of a container from another."""
    return found.id, found.started.ToMicroseconds()


@contextmanager
def _connected() -> Iterator[agent_pb2_grpc.SelfStub]:
    """Hold a connection for the block, and no longer."""
    address = f"unix:{os.environ.get(VARIABLE) or DEFAULT_SOCKET}"
    with translated(address), grpc.insecure_channel(address, options=OPTIONS) as channel:
        yield agent_pb2_grpc.SelfStub(channel)
