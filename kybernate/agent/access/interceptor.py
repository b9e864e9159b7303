"""Stands before every call: who calls, whether the role may, how often, and the line in the audit log."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from kybernate.agent.access.audit import AuditLog
from kybernate.agent.access.caller import CALLER, Caller, Role
from kybernate.agent.access.front import Callers
from kybernate.agent.access.limits import Buckets, Weights
from kybernate.agent.access.roles import RULES, Rule, permits
from kybernate.agent.access.wrapping import Answer, wrapped
from kybernate.agent.settings import Settings
from kybernate.logs import add_ids
from kybernate.node.failure import Denied, Exhausted, Failure
from kybernate_shim.trust.audit import Decision

REQUEST_ID: Final = "x-request-id"  # of a call's metadata, as proxies and service meshes name it
LONGEST_ID: Final = 128
# Of one caller that is no operator; an answer has at most 64 MiB, most have a few KiB.
MOST_CALLS: Final = 256
MOST_BYTES: Final = 64 << 20
MOST_BYTES_OF_ALL: Final = 256 << 20
UNKNOWN: Final = Caller(Role.NONE, name="a caller that is not known any more")
NO_RULE: Final = Rule(frozenset())


def request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the id by which a call's lines are found: the caller's `x-request-id`, or a new one."""
    given = next((value for name, value in metadata or () if name == REQUEST_ID), "")
    if isinstance(given, str) and 0 < len(given) <= LONGEST_ID and given.isprintable():
        return given
    return secrets.token_hex(8)


ACCESS_DENIED_ADVICE: Final = (
    "call as root, or with a certificate that `tls.operators` or `tls.readers` of agent.toml names"
)


def _weights() -> Weights:
    return Weights(calls=MOST_CALLS, bytes=MOST_BYTES, all_bytes=MOST_BYTES_OF_ALL)


@dataclass
class Access(grpc.aio.ServerInterceptor):
    """The one interceptor for access, of all sockets."""

    callers: Callers
    audit: AuditLog
    settings: Callable[[], Settings]
    buckets: Buckets
    weights: Weights = field(default_factory=_weights)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = details.method

        @asynccontextmanager
        async def around(request: Any, context: Any) -> AsyncIterator[Answer]:
            add_ids(request=request_id(context.invocation_metadata()), method=method.rpartition("/")[2])
            async with self._admitted(method, request, context.peer()) as answer:
                self._weigh(answer, context)
                yield answer

        return wrapped(handler, around)

    @asynccontextmanager
    async def _admitted(self, method: str, request: Any, peer: str) -> AsyncIterator[Answer]:
        caller, answer, rule = UNKNOWN, Answer(), RULES.get(method, NO_RULE)
        try:
            caller = self._caller(peer)
            self._check(method, caller)
            CALLER.set(caller)
            yield answer
        except Exception as error:
            if rule.verb:
                decision: Decision = "refused" if isinstance(error, Failure) else "failed"
                self.audit.refused(rule.verb, decision, method, caller, request, str(error))
            raise
        if rule.verb:
            self.audit.allowed(rule.verb, method, caller, request, answer.message)

    def _weigh(self, answer: Answer, context: Any) -> None:
        """Count the call, and its answers until they are sent. The operator's are not: it is root on the node.

        gRPC keeps what a client does not read, and a connection has many calls.
        """
        caller = CALLER.get()
        if caller.role == Role.OPERATOR:
            return
        key, sent = caller.key, 0

        def passes(message: Any) -> None:
            nonlocal sent
            size = message.ByteSize() if message is not None else -sent
            self.weights.add(key, size)
            sent += size

        self.weights.begin(key)
        context.add_done_callback(lambda context: self.weights.end(key, sent))
        answer.passes = passes

    def _caller(self, peer: str) -> Caller:
        one = self.callers.behind(peer)
        return UNKNOWN if one is None else one.caller()

    def _check(self, method: str, caller: Caller) -> None:
        if not permits(caller.role, method):
            raise Denied(
                f"{caller} may not call {method.rpartition('/')[2]}",
                state="nothing was changed",
                advice=ACCESS_DENIED_ADVICE,
            )
        if caller.container is None:
            return
        settings = self.settings().self_socket
        if caller.container.pod and not settings.tenants:
            raise Denied(
                "containers of pods may not use this socket",
                state="nothing was changed",
                advice="the node's administrator sets `self_socket.tenants` in agent.toml",
            )
        if not self.buckets.take(caller.key, settings.calls_per_minute):
            raise Exhausted(
                f"more than {settings.calls_per_minute} calls in a minute",
                state="nothing was changed",
                advice="wait; the node's administrator sets `self_socket.calls_per_minute`",
            )
