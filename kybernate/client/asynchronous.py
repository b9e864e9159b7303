"""The client of the agent for asyncio: the calls of `Agent` as coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Unpack

import grpc
from google.protobuf.message import Message

from kybernate.client import queries
from kybernate.client.agent import CALL_SECONDS, RETRY_SECONDS
from kybernate.client.contexts import Tls
from kybernate.client.errors import AgentUnreachable, fact_of, translated
from kybernate.client.known_operation import KnownOperation, end_of, left_until
from kybernate.client.queries import Query, Reply, sent
from kybernate.client.requests import Backoff, ImageFilters, Pages
from kybernate.client.target import target_of
from kybernate.client.verbs import Verbs
from kybernate.client.watching import Position
from kybernate.messages import agent_pb2 as wire


class AsyncOperation(KnownOperation):
    """An operation of the agent. `state` is the newest that was seen of it."""

    def __init__(self, agent: AsyncAgent, state: wire.Operation) -> None:
        super().__init__(state)
        self._agent = agent

    async def refresh(self) -> wire.Operation:
        """Ask for its state now."""
        self.state = (await self._agent.operation(self.id)).state
        return self.state

    async def follow(self, timeout: float | None = None) -> AsyncIterator[wire.Operation]:
        """Yield its states as `Operation.follow` does."""
        end = end_of(timeout)
        backoff = Backoff()
        while not self.done:
            self.require_time(end, timeout)
            try:
                async for state in self._agent._watch_operation(self.id, end):
                    self.state = state
                    backoff.reset()
                    yield state
            except AgentUnreachable:
                await asyncio.sleep(backoff.next_or_raise(time.monotonic()))

    async def result(self, timeout: float | None = None) -> wire.Result:
        """Wait for its end and return what came of it; raises as `Operation.result`."""
        async for _ in self.follow(timeout):
            pass
        return self.require_result()

    async def cancel(self) -> wire.Operation:
        """Have it undone; the answer may still be CANCELLING."""
        self.state = await self._agent.cancel(self.id)
        return self.state


class AsyncAgent(Verbs[Awaitable[AsyncOperation]]):
    """A connection to an agent, closed at the end of an `async with`; see `Agent`."""

    def __init__(self, address: str = "", *, tls: Tls | None = None) -> None:
        target = target_of(address, tls)
        self.address = target.address
        self.call_seconds = CALL_SECONDS  # for each call's answer
        self._channel = target.aio_channel()

    async def __aenter__(self) -> AsyncAgent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; operations continue."""
        await self._channel.close()

    # -- inventory

    async def node(self) -> wire.Node:
        """Return the node: GPUs, memory, tiers, versions, findings."""
        return await self._call(queries.node())

    async def containers(self, namespace: str = "", *, all: bool = False) -> Sequence[wire.Container]:
        """Return the containers of Kybernate's shims; with `all`, those of other shims, too."""
        return (await self._call(queries.containers(namespace, all=all))).containers

    async def revision(self) -> int:
        """Return the revision that the agent has come to: a watch that has reached it has seen all that was before."""
        return (await self._call(queries.revision())).revision

    async def container(self, name: str, namespace: str = "") -> wire.Container:
        """Return one container by id, the beginning of one, or the name of its pod."""
        return await self._call(queries.container(name, namespace))

    async def seats(self, *, all: bool = False) -> Sequence[wire.Seat]:
        """Return the seats that containers have; with `all`, those that are free, too."""
        return (await self._call(queries.seats(all=all))).seats

    async def seat(self, name: str, namespace: str = "") -> wire.Seat:
        """Return a seat by its name, or by the name of the container that has it."""
        return await self._call(queries.seat(name, namespace))

    async def schedule(self) -> Sequence[wire.Turn]:
        """Return when waiting seats have their turns, the next first."""
        return (await self._call(queries.schedule())).turns

    async def watch(
        self, kinds: Iterable[str] = (), *, revision: int = 0, instance: str = "", timeout: float | None = None
    ) -> AsyncIterator[wire.Change]:
        """Yield what changes, as `Agent.watch` does."""
        async for change in self._stream(queries.watch(kinds, revision, instance), timeout):
            yield change

    async def follow(
        self, kinds: Iterable[str] = (), *, on_trouble: Callable[[AgentUnreachable], object] = lambda error: None
    ) -> AsyncIterator[wire.Change]:
        """Yield what changes, as `Agent.follow` does."""
        position, wanted = Position(), tuple(kinds)
        while True:
            try:
                async for change in self.watch(wanted, revision=position.revision, instance=position.instance):
                    position.take(change)
                    yield change
            except AgentUnreachable as error:
                on_trouble(error)
            await asyncio.sleep(RETRY_SECONDS)

    async def log(
        self, container: str, namespace: str = "", *, lines: int = 100, follow: bool = False
    ) -> AsyncIterator[wire.LogLine]:
        """Yield lines of a container's output, as `Agent.log` does."""
        async for some in self._stream(queries.read_log(container, namespace, lines, follow=follow), None):
            for line in some.lines:
                yield line

    async def report_activity(
        self, container: str = "", *, workload: str = "", namespace: str = "", in_flight: int = 0, lasts: float = 0
    ) -> int:
        """Report requests in flight at a container, or at all of a NAMESPACE/WORKLOAD; return how many these are.

        The report holds for `lasts` seconds, 10 by default; the caller repeats it as long as it holds.
        """
        query = queries.report_activity(container, workload, namespace, in_flight, lasts)
        return (await self._call(query)).containers

    async def use_of(
        self, container: str, *, namespace: str = "", in_flight: int, lasts: float = 0, reporter: str = ""
    ) -> wire.ReportActivityResponse:
        """Report as `report_activity`, as one of several programs; return what all of them and the GPUs show."""
        return await self._call(queries.report_activity(container, "", namespace, in_flight, lasts, reporter))

    async def share_concurrency(
        self, requests: AsyncIterator[wire.ConcurrencyRequest]
    ) -> AsyncIterator[wire.ConcurrencyShare]:
        """Share what containers may have in flight: send requests, yield answers and changes, until the call ends."""
        call = self._channel.stream_stream(*queries.SHARING)
        stream = call(requests)
        try:
            async for share in stream:
                yield share
        except grpc.RpcError as error:
            raise fact_of(error, self.address) from error
        finally:
            stream.cancel()

    # -- operations

    async def operation(self, id: str) -> AsyncOperation:
        """Return an operation by its id."""
        return AsyncOperation(self, await self._call(queries.operation(id)))

    async def operations(
        self, *, states: Iterable[wire.OperationState] = (), container: str = "", limit: int = 0, before: str = ""
    ) -> list[AsyncOperation]:
        """Return operations, newest first."""
        found = await self._call(queries.operations(states, container, limit, before))
        return [AsyncOperation(self, one) for one in found.operations]

    async def cancel(self, id: str) -> wire.Operation:
        """Have an operation undone."""
        return await self._call(queries.cancel(id))

    # -- images

    async def images(self, *, limit: int = 0, **filters: Unpack[ImageFilters]) -> AsyncIterator[wire.Image]:
        """Yield the registry's images, newest first, at most `limit` where it is not 0."""
        pages = Pages(limit, filters)
        while (request := pages.next_request()) is not None:
            answer = await self._call(queries.images(request))
            for image in pages.take(answer):
                yield image

    async def image(self, name: str) -> wire.Image:
        """Return one image by id, the beginning of one, name or directory."""
        return await self._call(queries.image(name))

    async def pin(self, image: str, *, pinned: bool = True) -> wire.Image:
        """Keep an image from being deleted or evicted, or no longer."""
        return await self._call(queries.pin(image, pinned=pinned))

    async def label(self, image: str, labels: Mapping[str, str], *, removed: Iterable[str] = ()) -> wire.Image:
        """Add or change labels of an image, and remove those named in `removed`."""
        return await self._call(queries.label(image, labels, removed))

    # -- calls

    async def _begin(self, method: str, request: Message) -> AsyncOperation:
        return AsyncOperation(self, await self._call(Query(method, request, wire.Operation)))

    async def _call(self, query: Query[Reply]) -> Reply:
        call = self._channel.unary_unary(*sent(query))
        with translated(self.address):
            return await call(query.request, timeout=self.call_seconds)

    async def _stream(self, query: Query[Reply], timeout: float | None) -> AsyncIterator[Reply]:
        call = self._channel.unary_stream(*sent(query))
        stream = call(query.request, timeout=timeout)
        try:
            async for message in stream:
                yield message
        except grpc.RpcError as error:
            if timeout is None or error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise fact_of(error, self.address) from error
        finally:
            stream.cancel()

    async def _watch_operation(self, id: str, end: float | None) -> AsyncIterator[wire.Operation]:
        async for state in self._stream(queries.watch_operation(id), left_until(end)):
            yield state
