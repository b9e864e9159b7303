"""Events of containers find their pods, whichever is known first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from kybernate.agent.events.log import EventLog, made
from kybernate.agent.events.store import SCHEMA as EVENTS
from kybernate.agent.events.store import EventStore
from kybernate.agent.journal import Journal
from kybernate.agent.keeping.parking import PARKED
from kybernate.agent.kubernetes.access import Access
from kybernate.agent.kubernetes.cluster import MOST_EARLY, Cluster
from kybernate.agent.kubernetes.requests import SCHEMA
from kybernate.agent.kubernetes.spoken import SCHEMA as SPOKEN
from kybernate.agent.settings import Kubernetes
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.node.lookup import KnownContainer
from kybernate_shim.config import Config
from tests.fakes.api_server import ApiServer, api_server
from tests.unit.agent.test_hub import MemoryHistory

WEB = KnownContainer(
    "k8s.io", "c1", pod_namespace="shop", pod="web", name="main", pod_uid="u-1", state=wire.Container.RUNNING
)
PAUSE = KnownContainer("k8s.io", "p1", pod_namespace="shop", pod="web", pod_uid="u-1", sandbox=True)
ALONE = KnownContainer("default", "alone")


class Records:
    """containerd's records, as the inventory has seen them."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.seen: dict[tuple[str, str], KnownContainer] = {}

    def add(self, *containers: KnownContainer) -> None:
        self.seen |= {(one.namespace, one.id): one for one in containers}

    def record(self, namespace: str, id: str) -> KnownContainer | None:
        return self.seen.get((namespace, id))

    def known(self) -> list[KnownContainer]:
        return list(self.seen.values())


def in_cluster(path: Path, work: Callable[[Cluster, Records, Hub, ApiServer], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        records, hub = Records(), Hub(MemoryHistory())
        with api_server() as server:
            async with one_run(path, server, records, hub) as (cluster, _):
                await work(cluster, records, hub, server)

    asyncio.run(run())


@asynccontextmanager
async def one_run(
    path: Path, server: ApiServer, records: Records, hub: Hub | None = None
) -> AsyncIterator[tuple[Cluster, EventLog]]:
    """Run an agent over the journal of the one before; it ends as if it were killed."""
    journal = Journal(path / "journal.db", (*SCHEMA, *EVENTS, *SPOKEN))
    store, hub = EventStore(journal), hub or Hub(MemoryHistory())
    log = structlog.wrap_logger(structlog.testing.CapturingLogger())
    cluster = Cluster(
        Access(server.url), "node-1", None, journal, store, records, hub, Config, Kubernetes, log  # type: ignore[arg-type]
    )  # fmt: skip
    speaking, *others = cluster.parts()
    for one in others:
        one.close()
    task = asyncio.create_task(speaking)
    try:
        yield cluster, EventLog(store, [cluster.offer], log)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await cluster.close()
        journal.close()


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110  # of a thread, which sets no event
            await asyncio.sleep(0.002)


def event(type: str, container: KnownContainer = WEB, **about: str) -> wire.Event:
    return made(type, "info", "…", container=container.id, namespace=container.namespace, **about)


def reasons(server: ApiServer) -> list[str]:
    return [reason for reason, _, _ in server.story()]


def test_event_waits_for_a_container_that_was_not_seen_yet(tmp_path: Path) -> None:
    async def work(cluster: Cluster, records: Records, hub: Hub, server: ApiServer) -> None:
        for _ in range(3 * MOST_EARLY):
            cluster.offer(event("restore.started", image="/x/nightly"))
        records.add(WEB)
        cluster.offer(event("container.created"))
        await until(lambda: reasons(server) == ["Restoring"])

    in_cluster(tmp_path, work)


def test_container_that_is_gone_is_remembered(tmp_path: Path) -> None:
    async def work(cluster: Cluster, records: Records, hub: Hub, server: ApiServer) -> None:
        records.add(WEB)
        cluster.offer(event("container.created"))
        records.seen.clear()
        cluster.offer(event("container.checkpointed", image="/x/nightly"))
        await until(lambda: reasons(server) == ["Checkpointed"])

    in_cluster(tmp_path, work)


def test_containers_without_a_pod_and_sandboxes_have_no_events(tmp_path: Path) -> None:
    async def work(cluster: Cluster, records: Records, hub: Hub, server: ApiServer) -> None:
        records.add(WEB, PAUSE, ALONE)
        for one in (PAUSE, ALONE, WEB):
            cluster.offer(event("shim.found", one))
        cluster.offer(made("containerd.lost", "warning", "…"))
        await until(lambda: reasons(server) == ["ShimReachable"])
        (found,) = server.events.values()
        assert found["involvedObject"]["uid"] == "u-1"

    in_cluster(tmp_path, work)


def test_parked_container_says_so(tmp_path: Path) -> None:
    async def work(cluster: Cluster, records: Records, hub: Hub, server: ApiServer) -> None:
        records.add(WEB)
        operation = wire.Operation(id="o1", state=wire.SUCCEEDED, image="/x/parked", labels={PARKED: "c1"})
        hub.put(operation)
        cluster.offer(event("operation.succeeded", operation="o1", verb="checkpoint"))
        await until(lambda: reasons(server) == ["Parked"])

    in_cluster(tmp_path, work)


def test_what_was_not_written_before_the_agents_end_is_written_by_the_next_run(tmp_path: Path) -> None:
    about = {"container": WEB.id, "namespace": WEB.namespace}

    async def run() -> None:
        records = Records()
        records.add(WEB)
        with api_server() as server:
            async with one_run(tmp_path, server, records) as (_, log):
                await log.record("container.checkpointed", "info", "…", image="/x/first", **about)
                await until(lambda: len(server.events) == 1)
                server.refuse = [503] * 1000  # busy until the agent ends
                await log.record("container.checkpointed", "info", "…", image="/x/second", **about)
            server.refuse = []
            for number in range(2):
                async with one_run(tmp_path, server, records) as (_, log):
                    await log.record("container.checkpointed", "info", "…", image=f"/x/later-{number}", **about)
                    await until(lambda number=number: len(server.events) == 3 + number)
            told = [(message, count) for _, message, count in server.story()]
            assert sorted(told) == [(f"Wrote image {name}", 1) for name in ("first", "later-0", "later-1", "second")]

    asyncio.run(run())


def test_event_whose_answer_was_lost_with_the_agent_is_no_second_one(tmp_path: Path) -> None:
    about = {"container": WEB.id, "namespace": WEB.namespace}

    async def run() -> None:
        records = Records()
        records.add(WEB)
        with api_server() as server:
            server.refuse = [-503]  # it is taken, and the agent does not know
            async with one_run(tmp_path, server, records) as (_, log):
                await log.record("container.checkpointed", "info", "…", image="/x/first", **about)
                await until(lambda: server.events)
            async with one_run(tmp_path, server, records):
                await until(lambda: server.writes == ["create", "patch"])
            assert [count for _, _, count in server.story()] == [1]

    asyncio.run(run())


def test_earlier_events_are_not_told_when_a_node_joins_its_cluster(tmp_path: Path) -> None:
    async def run() -> None:
        records = Records()
        records.add(WEB)
        journal = Journal(tmp_path / "journal.db", EVENTS)
        about = {"container": WEB.id, "namespace": WEB.namespace}
        await EventLog(EventStore(journal), [], structlog.get_logger()).record("shim.found", "info", "…", **about)
        journal.close()
        with api_server() as server:
            async with one_run(tmp_path, server, records) as (_, log):
                await log.record("container.resumed", "info", "…", **about)
                await until(lambda: reasons(server) == ["Resumed"])

    asyncio.run(run())
