"""Webhooks against a real server: at least once, in order, whatever the receiver does."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import example, given
from hypothesis import strategies as st

from kybernate.agent.events import cursors as cursor_tables
from kybernate.agent.events import store as event_tables
from kybernate.agent.events.cursors import Cursors
from kybernate.agent.events.delivery import LONGEST_SECONDS, LONGEST_WISH, pause_before, wish_of
from kybernate.agent.events.log import EventLog
from kybernate.agent.events.store import EventStore
from kybernate.agent.events.webhooks import GIVE_UP_SECONDS, Hook, Timing, Webhooks
from kybernate.agent.journal import Journal
from kybernate.node.failure import Failure
from tests.unit.agent.receiver import Receiver, broken, receiver, status


class Node:
    """An agent's events and hooks over one journal; pauses between attempts are noted, and not waited for."""

    def __init__(self, journal: Journal, *, attempt_seconds: float = 5.0) -> None:
        self.pauses: list[float] = []
        self.ahead = 0.0  # of the clock
        self.store = EventStore(journal)
        log = structlog.wrap_logger(structlog.testing.CapturingLogger())
        timing = Timing(attempt_seconds, lambda: time.time() + self.ahead, lambda: 1.0, self._sleep)
        self.hooks = Webhooks(self.store, Cursors(journal), "node-1", log, timing)
        self.events = EventLog(self.store, [self.hooks.wake], log)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def record(self, *types: str) -> list[int]:
        return [(await self.events.record(type, "info", "x", bytes=7)).id for type in types]


async def until(look: Callable[[], object]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(60):
        while not look():  # noqa: ASYNC110  # of a thread, which sets no event
            await asyncio.sleep(0.005)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.db", [*event_tables.SCHEMA, *cursor_tables.SCHEMA])


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as there:
        yield there


def with_node(journal: Journal, work: Callable[[Node], Coroutine[Any, Any, None]], **given: Any) -> None:
    async def run() -> None:
        node = Node(journal, **given)
        try:
            await work(node)
        finally:
            await node.hooks.close()

    asyncio.run(run())


def test_request_is_signed_json(journal: Journal, server: Receiver) -> None:
    async def work(node: Node) -> None:
        await node.hooks.configure([Hook(server.url, secret=b"key")])
        await node.record("container.suspended")
        await until(lambda: server.received)

    with_node(journal, work)
    got = server.received[0]
    assert (got.event["type"], got.event["node"], got.event["fields"]) == (
        "container.suspended",
        "node-1",
        {"bytes": "7"},
    )
    fields = dict(part.split("=", 1) for part in got.headers["Kybernate-Signature"].split(","))
    mac = hmac.new(b"key", fields["t"].encode() + b"." + got.body, hashlib.sha256).hexdigest()
    assert fields["v1"] == mac
    assert abs(int(fields["t"]) - time.time()) < 60
    assert got.headers["Kybernate-Event"] == "container.suspended"


def test_failures_are_repeated_with_the_same_delivery_id(journal: Journal, server: Receiver) -> None:
    server.answers += [status(500), status(503), broken]

    async def work(node: Node) -> None:
        await node.hooks.configure([Hook(server.url)])
        await node.record("a.happened", "b.happened")
        await until(lambda: len(server.received) == 5)
        assert node.pauses == [1.0, 2.0, 4.0]

    with_node(journal, work)
    assert server.ids == [2, 2, 2, 2, 3]
    deliveries = [one.headers["Kybernate-Delivery"] for one in server.received]
    assert len(set(deliveries)) == 2
    assert "Kybernate-Signature" not in server.received[0].headers


def test_retry_after_is_respected(journal: Journal, server: Receiver) -> None:
    server.answers += [status(429, Retry_After="17"), status(503, Retry_After="never")]

    async def work(node: Node) -> None:
        await node.hooks.configure([Hook(server.url)])
        await node.record("a.happened")
        await until(lambda: len(server.received) == 3)
        assert node.pauses == [17.0, 2.0]

    with_node(journal, work)


def test_receiver_that_hangs_delays_no_other(journal: Journal, server: Receiver) -> None:
    server.answers += [server.hang, server.drip]

    async def work(node: Node) -> None:
        with receiver() as other:
            await node.hooks.configure([Hook(server.url), Hook(other.url)])
            await node.record("a.happened", "b.happened")
            await until(lambda: other.ids == [2, 3])
            await until(lambda: server.ids == [2, 2, 2, 3])

    with_node(journal, work, attempt_seconds=0.2)


def test_restart_goes_on_where_it_stopped(journal: Journal, server: Receiver) -> None:
    hook = Hook(server.url)

    async def first(node: Node) -> None:
        await node.hooks.configure([hook])
        await node.record("a.happened")
        await until(lambda: server.ids == [2])
        await until(lambda: not node.hooks._running[hook].news.is_set())
        await node.hooks.close()
        await node.record("b.happened")

    async def second(node: Node) -> None:
        await node.hooks.configure([hook])
        await node.record("c.happened")
        await until(lambda: server.ids[-1:] == [5])

    with_node(journal, first)
    with_node(journal, second)
    assert [id for id in server.ids if id != 2] == [3, 4, 5]  # a delivery that was just noted may be repeated


def test_delivery_that_was_not_noted_is_repeated(journal: Journal, server: Receiver) -> None:
    server.answers += [server.hang]

    async def first(node: Node) -> None:
        await node.hooks.configure([Hook(server.url)])
        await node.record("a.happened")
        await until(lambda: server.ids == [2])

    async def second(node: Node) -> None:
        await node.hooks.configure([Hook(server.url)])
        await until(lambda: server.ids == [2, 2, 3])

    with_node(journal, first)
    with_node(journal, second)


def test_new_hook_begins_with_what_happens_from_now_on(journal: Journal, server: Receiver) -> None:
    async def work(node: Node) -> None:
        await node.record("before.happened")
        await node.hooks.configure([Hook(server.url)])
        await node.record("after.happened")
        await until(lambda: server.ids == [3])

    with_node(journal, work)


def test_types_and_level_filter(journal: Journal, server: Receiver) -> None:
    async def work(node: Node) -> None:
        await node.hooks.configure([Hook(server.url, types=("container.*",), level="warning")])
        await node.record("container.paused", "agent.stopped")
        await node.events.record("operation.failed", "error", "x")
        last = await node.events.record("container.lost", "error", "x")
        await until(lambda: server.ids == [last.id])

    with_node(journal, work)


def test_redirect_is_not_followed(journal: Journal, server: Receiver) -> None:
    async def work(node: Node) -> None:
        with receiver() as other:
            server.answers.append(status(307, Location=other.url))
            await node.hooks.configure([Hook(server.url)])
            await node.record("a.happened")
            await until(lambda: server.ids == [2, 2])
            assert not other.received

    with_node(journal, work)


def test_event_that_is_refused_is_given_up_after_some_attempts(journal: Journal, server: Receiver) -> None:
    server.answers += [status(422)] * 5

    async def work(node: Node) -> None:
        await node.hooks.configure([Hook(server.url)])
        await node.record("a.happened", "b.happened")
        await until(lambda: server.ids == [2, 2, 2, 2, 2, 3])

    with_node(journal, work)


def test_event_is_given_up_after_a_day(journal: Journal, server: Receiver) -> None:
    server.answers += [status(500), status(500)]

    async def work(node: Node) -> None:
        await node.hooks.configure([Hook(server.url)])
        node.ahead = GIVE_UP_SECONDS
        await node.record("a.happened", "b.happened", "c.happened")
        await until(lambda: server.ids == [2, 3, 4])

    with_node(journal, work)


def self_signed(directory: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (directory / "server.pem").write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem")
    return context


def test_unknown_certificate_gets_nothing(journal: Journal, tmp_path: Path) -> None:
    async def work(node: Node) -> None:
        with receiver(self_signed(tmp_path)) as there:
            await node.hooks.configure([Hook(there.url)])
            await node.record("a.happened")
            await until(lambda: len(node.pauses) >= 2)
            assert not there.received

    with_node(journal, work)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/", "host/path", "https://", "unix:///x", ""])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(Failure, match="URL of a webhook"):
        Hook(url)


def test_name_of_a_hook_has_no_secrets() -> None:
    hook = Hook("https://user:password@example.org:8443/path/token?key=1", secret=b"hidden")
    assert hook.title == "https://example.org:8443"
    assert "hidden" not in repr(hook)


@given(st.integers(1, 10_000), st.floats(0, LONGEST_WISH), st.floats(0, 1))
def test_pause_is_bounded_and_no_less_than_wished(attempt: int, wish: float, chance: float) -> None:
    pause = pause_before(attempt, wish, lambda: chance)
    assert max(wish, 0.5) <= pause <= max(wish, LONGEST_SECONDS)


@given(st.text(max_size=40))
@example("9" * 4000)
@example("-1")
@example("Fri, 31 Dec 9999 23:59:59 -2359")
def test_any_retry_after_is_a_bounded_pause(text: str) -> None:
    assert 0 <= wish_of(text, datetime.now(UTC)) <= LONGEST_WISH


def test_retry_after_may_be_a_date() -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    assert wish_of(format_datetime(now + timedelta(seconds=90), usegmt=True), now) == 90
    assert wish_of(format_datetime(now - timedelta(days=9), usegmt=True), now) == 0
