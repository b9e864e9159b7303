"""A pod's shim on its ttrpc socket: the service that does what containerd's API has no words for.

The socket is found by the formula that the shim itself uses, so no file of containerd's has to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from kybernate.messages.agent_pb2 import Container
from kybernate.node.failure import Failure, Missing, Refused, TimedOut
from kybernate.node.lookup import KnownContainer
from kybernate_shim.address import socket_path
from kybernate_shim.linux.process import has_ended
from kybernate_shim.messages import shim_pb2 as wire
from kybernate_shim.trust.caller import OWN_SERVICE as SERVICE
from kybernate_shim.ttrpc import Client, Code, RpcError

CONNECT_SECONDS = 5.0
STATUS_SECONDS = 5.0
GPU_STATUS_SECONDS = 30.0  # the shim may have to start the CUDA helper for it, and gives that up sooner
WATCH_SECONDS = 0.1

Reply = TypeVar("Reply", bound=Message)


class NotKybernate(Failure):
    """The container runs under another shim."""

    advice = "run it with `runtimeClassName: kybernate`, or `ctr run --runtime io.containerd.kybernate.v1`"


class ShimTooOld(Failure):
    """The shim is Kybernate's, of a release that does not know the call."""

    advice = "a container keeps the shim that it was started with: start it again"


class ShimGone(Failure):
    """No process listens on the socket of the container's shim, or its connection ended before the answer."""

    advice = "containerd cleans up after a dead shim; read its log, and start the container again"


class ShimRefused(Failure):
    """The shim answered a call with an error; `code` is ttrpc's name of it, CANCELED where a client cancelled it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class NothingToCancel(ShimRefused):
    """The operation that was to be cancelled does not run: it has ended, or the shim does not know it."""


class Shim:
    """A connection to the shim of `container`; its calls run side by side.

    With an `operation` in its request, a checkpoint, suspend, park or resume is the caller's own of that name: a second
    request, after a connection that broke, waits for the same end or gets the same answer. One that was cancelled
    raises ShimRefused with the code CANCELED.
    """

    def __init__(self, client: Client, container: KnownContainer) -> None:
        self._client = client
        self._container = container

    async def checkpoint(self, request: wire.CheckpointRequest) -> wire.CheckpointResponse:
        """Write a checkpoint image. The deadline is the shim's own: `timeout_seconds` of the request.

        Raises Failure where the container is not held though `hold` asks for it.
        """
        reply = await self._call("Checkpoint", request, wire.CheckpointResponse, timeout=None)
        if request.hold and not reply.held_seconds:
            raise Failure(
                f"container {self._container.title} is not held: it ended meanwhile, or its shim is of a release that"
                " cannot hold one",
                state=f"the image {reply.path} is complete, and the container, if it has not ended, runs on",
                advice="`kybernate ps` shows the container; one that was started by this release can be held",
            )
        return reply

    async def release(self, id: str) -> wire.Container:
        """Let a held container run on, and return what it is then."""
        reply = await self._call("Release", wire.ReleaseRequest(id=id), wire.ReleaseResponse, timeout=None)
        return reply.container

    async def suspend(self, request: wire.SuspendRequest) -> wire.SuspendResponse:
        """Move the container's VRAM into host memory."""
        return await self._call("Suspend", request, wire.SuspendResponse, timeout=None)

    async def park(self, request: wire.ParkRequest) -> wire.ParkResponse:
        """Move what a suspended container has in the arena to the disk."""
        return await self._call("Park", request, wire.ParkResponse, timeout=None)

    async def resume(self, request: wire.ResumeRequest) -> wire.ResumeResponse:
        """Move it back."""
        return await self._call("Resume", request, wire.ResumeResponse, timeout=None)

    async def cancel(self, id: str, operation: str = "", *, timeout: float | None = None) -> wire.CancelResponse:
        """Undo the operation of that name on a container, or whatever runs, and return how it has ended.

        It completes where it cannot be stopped any more; `ended.outcome` of the reply says so. After `timeout` seconds
        the undo continues in the shim, and a second call waits for it. Raises NothingToCancel.
        """
        request = wire.CancelRequest(id=id, operation=operation)
        try:
            return await self._call("Cancel", request, wire.CancelResponse, timeout=timeout)
        except Missing as error:
            raise NothingToCancel(str(error), code=Code.NOT_FOUND.name) from error
        except ShimRefused as error:
            if error.code != Code.FAILED_PRECONDITION.name:
                raise
            raise NothingToCancel(str(error), code=error.code) from error

    async def status(self, id: str = "", *, gpu: bool = False) -> list[wire.Container]:
        """Return what a container is doing, or all containers of the shim; with `gpu`, what the driver says, too."""
        request = wire.StatusRequest(id=id, gpu=gpu)
        seconds = GPU_STATUS_SECONDS if gpu else STATUS_SECONDS
        return list((await self._call("Status", request, wire.StatusResponse, timeout=seconds)).containers)

    async def _call(self, method: str, request: Message, reply: type[Reply], *, timeout: float | None) -> Reply:
        try:
            return await self._client.call(SERVICE, method, request, reply, timeout=timeout)
        except RpcError as error:
            raise _translated(error, self._container) from error
        except TimeoutError as error:
            raise TimedOut(
                f"the shim of {self._container.title} has not answered for {timeout:g} s",
                advice="`kybernate status CONTAINER` shows what it is doing",
            ) from error
        except ConnectionError as error:
            raise ShimGone(f"the shim of {self._container.title} ended before it answered: {error}") from error


@asynccontextmanager
async def shim_of(container: KnownContainer, address: str) -> AsyncIterator[Shim]:
    """Connect to the shim of `container`, whose containerd listens on `address`.

    Raises Missing, NotKybernate, ShimGone and Refused; calls raise ShimTooOld as well.
    """
    try:
        client = await Client.connect(str(socket_of(container, address)), timeout=CONNECT_SECONDS)
    except PermissionError as error:
        raise Refused(
            f"cannot connect to the shim of {container.title}: {error.strerror}", advice="run as root"
        ) from error
    except OSError as error:
        raise _unconnected(container, error) from error
    try:
        yield Shim(client, container)
    finally:
        await client.close()


@asynccontextmanager
async def watching(shim: Shim, id: str, seen: Callable[[wire.Container], object]) -> AsyncIterator[None]:
    """Report to `seen` what the container is doing, ten times a second, until the block ends.

    A status that fails is left out: the call that is watched will say what is wrong.
    """

    async def watch() -> None:
        while True:
            try:
                for status in await shim.status(id):
                    seen(status)
            except Failure:
                pass
            await asyncio.sleep(WATCH_SECONDS)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def restore_of(container: KnownContainer, address: str) -> wire.Ended:
    """Return how a container's restore has ended, with its steps.

    It is empty where the shim does not know it any more, or has ended with a container that did so immediately.
    """
    try:
        async with shim_of(container, address) as shim:
            found = await shim.status(container.id)
    except Failure:
        return wire.Ended()
    ended = [one for status in found for one in (status.last, *status.earlier) if one.verb == "restore"]
    return ended[0] if ended else wire.Ended()


async def state_now(container: KnownContainer, address: str) -> str:
    """Say in words what became of a container after a call that failed; empty where it cannot be determined."""
    try:
        async with shim_of(container, address) as shim:
            found = await shim.status(container.id, gpu=True)
    except Failure:
        return ""
    if not found:
        return f"container {container.title} is gone"
    phase = f", in the middle of a {found[0].phase}" if found[0].phase else ""
    suspended = ", its VRAM in host memory" if found[0].suspended else ""
    note = f"; {found[0].note}" if found[0].note else ""
    # A kill may have ended it that the shim has yet to make known.
    state = "has ended" if found[0].pid and has_ended(found[0].pid) else f"is {found[0].state}{suspended}{phase}"
    return f"container {container.title} {state}{note}"


def are_over(found: Iterable[wire.Container]) -> bool:
    """Return whether no process of what a shim has named is left, which the shim may have yet to make known."""
    return all(one.state == "stopped" or (one.pid and has_ended(one.pid)) for one in found)


def socket_of(container: KnownContainer, address: str) -> Path:
    """Return the socket of the container's shim.

    The shim was started with containerd's own spelling of its address. A user's may differ by a symbolic link such as
    /var/run, so the resolved spelling is taken where it leads to a socket and the given one does not.
    """
    group = container.group or container.id
    given = socket_path(address, container.namespace, group)
    resolved = socket_path(str(Path(address).resolve()), container.namespace, group)
    return resolved if resolved.exists() and not given.exists() else given


def named_kybernate(container: KnownContainer) -> bool:
    """Return whether containerd's name of the runtime is that of our shim. Another name may still lead to ours."""
    return "kybernate" in container.runtime


def _unconnected(container: KnownContainer, error: OSError) -> Failure:
    if not container.live:
        return Missing(
            f"container {container.title} has no processes: {life_of(container)}",
            advice=f"start it, for example with `ctr -n {container.namespace} task start {container.id}`",
        )
    if isinstance(error, FileNotFoundError) and not named_kybernate(container):
        return NotKybernate(f"container {container.title} does not run under Kybernate, but under {container.runtime}")
    return ShimGone(f"the shim of {container.title} is dead: no process listens on its socket ({error})")


def life_of(container: KnownContainer) -> str:
    """Return in words what a container without processes is."""
    return f"its task is {container.state_word}" if container.state != Container.NO_TASK else "it has no task"


def _translated(error: RpcError, container: KnownContainer) -> Failure:
    if error.code == Code.UNIMPLEMENTED and named_kybernate(container):
        return ShimTooOld(f"the shim of {container.title} is too old for this: {error.message}")
    if error.code == Code.UNIMPLEMENTED:
        return NotKybernate(
            f"the shim of {container.title} does not implement the call; its runtime is {container.runtime}"
            f" ({error.message})"
        )
    if error.code == Code.NOT_FOUND:
        return Missing(f"container {container.title} is unknown to its shim: {error.message}")
    return ShimRefused(error.message, code=error.code.name)
