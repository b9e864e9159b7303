"""Calls to the shims of an operation's containers: to carry it out, to undo it, and to find out what became of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kybernate.node.containerd import Containerd, ContainerdUnreachable
from kybernate.node.failure import Failure, Missing, TimedOut
from kybernate.node.lookup import CONTAINER_NOT_FOUND_ADVICE, KnownContainer
from kybernate.node.shim import NothingToCancel, ShimGone, ShimRefused, shim_of, state_now, watching
from kybernate.verbs.errors import OperationUndone, OutcomeUnknown
from kybernate.verbs.evidence import Evidence, judge
from kybernate.verbs.model import Observation, Operation, Result
from kybernate.verbs.node import Node
from kybernate_shim.messages import shim_pb2 as shim_wire

if TYPE_CHECKING:
    from kybernate.verbs.attempt import Attempt
    from kybernate.verbs.of_shims import OfShim

ASK_AGAIN_SECONDS = 0.2

Status = tuple[shim_wire.Container | None, str]  # what a shim says of a container, or why there is nothing


async def executed(verb: OfShim, attempt: Attempt) -> Result:
    """Call the shim of the operation's container; see Verb.execute."""
    operation, node = attempt.operation, attempt.node
    try:
        container = await container_of(node, operation, operation.target.container)
        attempt.check()
        async with shim_of(container, node.address) as shim, watching(shim, container.id, attempt.status):
            return await verb.call_shim(shim, container, attempt)
    except (ShimGone, TimedOut, ContainerdUnreachable) as error:
        raise OutcomeUnknown(str(error)) from error
    except ShimRefused as error:
        if error.code == "CANCELED":
            raise OperationUndone(str(error)) from error
        error.args = (f"cannot {operation.verb} {container.title}: {error}",)
        error.state = await state_now(container, node.address)
        raise


async def observed(verb: OfShim, node: Node, operation: Operation) -> Observation:
    """Return what became of an operation, from its shim and its image; see Verb.observe."""
    status, problem = await status_of(node, operation, operation.target.container)
    image = await asyncio.to_thread(verb.image_of, operation)
    return judge(operation, Evidence(operation.boot != node.boot, status, problem, image))


async def container_of(node: Node, operation: Operation, id: str) -> KnownContainer:
    """Return a container of the operation as it is now. Raises Missing and ContainerdUnreachable."""

    def find() -> KnownContainer:
        with Containerd(node.address) as containerd:
            found = containerd.container(operation.target.namespace, id)
        if found is None:
            raise Missing(f"container {id} is gone", advice=CONTAINER_NOT_FOUND_ADVICE)
        return found[0]

    return await asyncio.to_thread(find)


async def cancel_part(node: Node, operation: Operation, id: str, name: str, ended: asyncio.Event) -> None:
    """Ask the shim of a container to undo what it knows by `name`, until it does or the attempt has ended."""
    while not ended.is_set():
        try:
            container = await container_of(node, operation, id)
            async with shim_of(container, node.address) as shim:
                await shim.cancel(id, name)
            return
        except NothingToCancel as error:
            if error.code == "FAILED_PRECONDITION":
                return  # it has ended otherwise
        except Missing:
            return  # it has ended with its container
        try:  # the request is not with the shim yet
            async with asyncio.timeout(ASK_AGAIN_SECONDS):
                await ended.wait()
        except TimeoutError:
            pass


async def status_of(node: Node, operation: Operation, id: str) -> Status:
    """Return what a container's shim says, or why there is none. Raises ContainerdUnreachable, TimedOut."""
    try:
        container = await container_of(node, operation, id)
        async with shim_of(container, node.address) as shim:
            found = await shim.status(id)
    except (ContainerdUnreachable, TimedOut):
        raise
    except Failure as error:
        return None, str(error)
    return (found[0], "") if found else (None, "its shim does not know it")
