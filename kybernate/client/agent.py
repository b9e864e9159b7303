"""The blocking client of the agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Unpack

import grpc
from google.protobuf.message import Message

from kybernate.client import queries
from kybernate.client.contexts import Tls
from kybernate.client.errors import AgentUnreachable, fact_of, translated
from kybernate.client.known_operation import KnownOperation, end_of, left_until
from kybernate.client.queries import Query, Reply, sent
from kybernate.client.requests import Backoff, ImageFilters, Pages
from kybernate.client.target import target_of
from kybernate.client.verbs import Verbs
from kybernate.client.watching import Position
from kybernate.messages import agent_pb2 as wire

CALL_SECONDS = 30.0
RETRY_SECONDS = 1.0  # between attempts to reach an agent that is away


class Operation(KnownOperation):
    """An operation of the agent. `state` is the newest that was seen of it."""

    def __init__(self, agent: Agent, state: wire.Operation) -> None:
        super().__init__(state)
        self._agent = agent

    def refresh(self) -> wire.Operation:
        """Ask for its state now."""
        self.state = self._agent.operation(self.id).state
        return self.state

    def follow(self, timeout: float | None = None) -> Iterator[wire.Operation]:
        """Yield its states until a final one, for at most `timeout` seconds. Raises NotFinished.

        An operation outlives the agent: where that is started again, the client connects again and continues.
        """
        end = end_of(timeout)
        backoff = Backoff()
        while not self.done:
            self.require_time(end, timeout)
            try:
                for state in self._agent._watch_operation(self.id, end):
                    self.state = state
                    backoff.reset()
                    yield state
            except AgentUnreachable:
                time.sleep(backoff.next_or_raise(time.monotonic()))

    def result(self, timeout: float | None = None) -> wire.Result:
        """Wait for its end and return what came of it. Raises NotFinished, OperationFailed, OperationCancelled."""
        for _ in self.follow(timeout):
            pass
        return self.require_result()

    def cancel(self) -> wire.Operation:
        """Have it undone; the answer may still be CANCELLING."""
        self.state = self._agent.cancel(self.id)
        return self.state


class Agent(Verbs[Operation]):
    """A connection to an agent, closed at the end of a `with`.

    `address` is a socket's path, or HOST:PORT with `tls`; by default $KYBERNATE_AGENT or the node's own socket.
    Every call raises AgentUnreachable and AgentRefused.
    """

    def __init__(self, address: str = "", *, tls: Tls | None = None) -> None:
        target = target_of(address, tls)
        self.address = target.address
        self.call_seconds = CALL_SECONDS  # for each call's answer
        self._channel = target.channel()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; operations continue."""
        self._channel.close()

    # -- inventory

    def node(self) -> wire.Node:
        """Return the node: GPUs, memory, tiers, versions, findings."""
        return self._call(queries.node())

    def containers(self, namespace: str = "", *, all: bool = False) -> Sequence[wire.Container]:
        """Return the containers of Kybernate's shims; with `all`, those of other shims, too."""
        return self._call(queries.containers(namespace, all=all)).containers

    def revision(self) -> int:
        """Return the revision that the agent has come to: a watch that has reached it has seen all that was before."""
        return self._call(queries.revision()).revision

    def container(self, name: str, namespace: str = "") -> wire.Container:
        """Return one container by id, the beginning of one, or the name of its pod."""
        return self._call(queries.container(name, namespace))

    def seats(self, *, all: bool = False) -> Sequence[wire.Seat]:
        """Return the seats that containers have; with `all`, those that are free, too."""
        return self._call(queries.seats(all=all)).seats

    def seat(self, name: str, namespace: str = "") -> wire.Seat:
        """Return a seat by its name, or by the name of the container that has it."""
        return self._call(queries.seat(name, namespace))

    def schedule(self) -> Sequence[wire.Turn]:
        """Return when waiting seats have their turns, the next first."""
        return self._call(queries.schedule()).turns

    def watch(
        self, kinds: Iterable[str] = (), *, revision: int = 0, instance: str = "", timeout: float | None = None
    ) -> Iterator[wire.Change]:
        """Yield what changes, after `revision` of an agent's `instance`; first all that there is where it is 0.

        Ends after `timeout` seconds. A client that reconnects passes the last change's revision and instance.
        """
        yield from self._stream(queries.watch(kinds, revision, instance), timeout)

    def follow(
        self, kinds: Iterable[str] = (), *, on_trouble: Callable[[AgentUnreachable], object] = lambda error: None
    ) -> Iterator[wire.Change]:
        """Yield what changes, first all that there is, over restarts of the agent, without an end.

        While the agent is away, `on_trouble` is called with each vain attempt, between which some seconds pass. Raises
        AgentRefused.
        """
        position, wanted = Position(), tuple(kinds)
        while True:
            try:
                for change in self.watch(wanted, revision=position.revision, instance=position.instance):
                    position.take(change)
                    yield change
            except AgentUnreachable as error:
                on_trouble(error)
            time.sleep(RETRY_SECONDS)

    def log(
        self, container: str, namespace: str = "", *, lines: int = 100, follow: bool = False
    ) -> Iterator[wire.LogLine]:
        """Yield the last lines of a container's output, and with `follow` those that come, until it is removed."""
        for some in self._stream(queries.read_log(container, namespace, lines, follow=follow), None):
            yield from some.lines

    def report_activity(
        self, container: str = "", *, workload: str = "", namespace: str = "", in_flight: int = 0, lasts: float = 0
    ) -> int:
        """Report requests in flight at a container, or at all of a NAMESPACE/WORKLOAD; return how many these are.

        The report holds for `lasts` seconds, 10 by default; the caller repeats it as long as it holds.
        """
        query = queries.report_activity(container, workload, namespace, in_flight, lasts)
        return self._call(query).containers

    def use_of(
        self, container: str, *, namespace: str = "", in_flight: int, lasts: float = 0, reporter: str = ""
    ) -> wire.ReportActivityResponse:
        """Report as `report_activity`, as one of several programs; return what all of them and the GPUs show."""
        return self._call(queries.report_activity(container, "", namespace, in_flight, lasts, reporter))

    def share_concurrency(self, requests: Iterator[wire.ConcurrencyRequest]) -> Iterator[wire.ConcurrencyShare]:
        """Share what containers may have in flight: send requests, yield answers and changes, until the call ends."""
        call = self._channel.stream_stream(*queries.SHARING)
        stream = call(requests)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise fact_of(error, self.address) from error
        finally:
            stream.cancel()

    # -- operations

    def operation(self, id: str) -> Operation:
        """Return an operation by its id."""
        return Operation(self, self._call(queries.operation(id)))

    def operations(
        self, *, states: Iterable[wire.OperationState] = (), container: str = "", limit: int = 0, before: str = ""
    ) -> list[Operation]:
        """Return operations, newest first."""
        found = self._call(queries.operations(states, container, limit, before))
        return [Operation(self, one) for one in found.operations]

    def cancel(self, id: str) -> wire.Operation:
        """Have an operation undone."""
        return self._call(queries.cancel(id))

    # -- images

    def images(self, *, limit: int = 0, **filters: Unpack[ImageFilters]) -> Iterator[wire.Image]:
        """Yield the registry's images, newest first, at most `limit` where it is not 0."""
        pages = Pages(limit, filters)
        while (request := pages.next_request()) is not None:
            answer = self._call(queries.images(request))
            yield from pages.take(answer)

    def image(self, name: str) -> wire.Image:
        """Return one image by id, the beginning of one, name or directory."""
        return self._call(queries.image(name))

    def pin(self, image: str, *, pinned: bool = True) -> wire.Image:
        """Keep an image from being deleted or evicted, or no longer."""
        return self._call(queries.pin(image, pinned=pinned))

    def label(self, image: str, labels: Mapping[str, str], *, removed: Iterable[str] = ()) -> wire.Image:
        """Add or change labels of an image, and remove those named in `removed`."""
        return self._call(queries.label(image, labels, removed))

    # -- calls

    def _begin(self, method: str, request: Message) -> Operation:
        return Operation(self, self._call(Query(method, request, wire.Operation)))

    def _call(self, query: Query[Reply]) -> Reply:
        call = self._channel.unary_unary(*sent(query))
        with translated(self.address):
            return call(query.request, timeout=self.call_seconds)

    def _stream(self, query: Query[Reply], timeout: float | None) -> Iterator[Reply]:
        call = self._channel.unary_stream(*sent(query))
        stream = call(query.request, timeout=timeout)
        try:
            yield from stream
        except grpc.RpcError as error:
            if timeout is None or error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise fact_of(error, self.address) from error
        finally:
            stream.cancel()

    def _watch_operation(self, id: str, end: float | None) -> Iterator[wire.Operation]:
        yield from self._stream(queries.watch_operation(id), left_until(end))
