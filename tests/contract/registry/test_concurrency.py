"""Several threads and several agents at one registry: no update is lost, and a server that restarts is waited for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from kybernate.node.failure import Failure, Unavailable
from kybernate.registry import database as databases
from kybernate.registry.beside import read
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.failures import RegistryDamaged
from kybernate.registry.model import Filter, Replica
from tests.contract.registry.postgresql import PostgreSql
from tests.contract.registry.rows import row

NODES = ("node-a", "node-b", "node-c")
EACH = 8


def test_no_label_of_several_agents_is_lost(opened: Callable[..., Catalogue], tmp_path: Path) -> None:
    agents = [opened(node) for node in NODES]
    (tmp_path / "a").mkdir()
    image = replace(row(1), replicas=(Replica("node-a", str(tmp_path / "a"), "disk", "a"),))
    agents[0].add(image)

    def work(agent: Catalogue, number: int) -> None:
        agent.label("a", {f"{agent.node}-{number}": str(number)})
        agent.used("a", 1.0)

    with ThreadPoolExecutor(len(NODES) * 2) as pool:
        list(pool.map(lambda job: work(*job), [(agent, number) for number in range(EACH) for agent in agents]))
    agents[0].write_beside()
    stored = agents[1].get("a")
    assert stored.annotations.labels == {f"{node}-{number}": str(number) for node in NODES for number in range(EACH)}
    assert stored.annotations.revision > EACH * len(NODES)
    kept = read(tmp_path / "a")
    assert kept is not None
    assert kept.annotations == stored.annotations


def test_image_that_several_agents_add_has_all_replicas(opened: Callable[..., Catalogue]) -> None:
    agents = [opened(f"{node}-agent") for node in NODES]

    def work(job: tuple[Catalogue, str, int]) -> None:
        agent, node, number = job
        agent.add(row(number, node=node))
        if number % 2:
            agent.drop_replica(row(number).replicas[0].place, node=node)

    jobs = [(agent, node, number) for number in range(EACH) for agent, node in zip(agents, NODES, strict=True)]
    with ThreadPoolExecutor(len(NODES) * 2) as pool:
        list(pool.map(work, jobs))
    found = agents[0].list().images
    assert [one.id for one in found] == [row(number).id for number in reversed(range(0, EACH, 2))]
    assert {tuple(replica.node for replica in one.replicas) for one in found} == {NODES}


def test_generations_are_given_once(opened: Callable[..., Catalogue]) -> None:
    agents = [opened(node) for node in NODES]
    with ThreadPoolExecutor(len(NODES)) as pool:
        list(pool.map(lambda number: agents[number % 3].add(row(number * 3, node="s")), range(EACH)))
    found = agents[0].generations("web-0", namespace="shop")
    assert sorted(one.annotations.generation or 0 for one in found) == list(range(EACH))


def test_reader_sees_one_state(opened: Callable[..., Catalogue]) -> None:
    reader, writer = opened("node-a"), opened("node-x")
    done = Event()

    def churn() -> None:
        number = 0
        while not done.is_set():
            writer.add(row(number % 5))
            writer.put_replica(row(number % 5).key, Replica("", f"s3://{number % 5}", "s3"))
            writer.remove(row(number % 5).key)
            number += 1

    thread = Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            page = reader.list(Filter(namespace="shop"))
            assert page.total == len(page.images)
            assert all(one.replicas for one in page.images)
    finally:
        done.set()
        thread.join()


def test_server_that_restarts_is_waited_for(server: PostgreSql, template: str) -> None:
    with Catalogue(server.database(template), node="node-a") as catalogue:
        catalogue.add(row(1))
        with ThreadPoolExecutor(4) as pool:
            server.stop()
            try:
                running = [pool.submit(catalogue.label, "image-1", {f"n{number}": ""}) for number in range(4)]
                reading = pool.submit(catalogue.totals)
            finally:
                server.start()
            assert [one.result().id for one in running] == [row(1).id] * 4
            assert reading.result().images == 1
        assert len(catalogue.get("image-1").annotations.labels) == 4


def test_server_that_stays_away_is_unreachable(server: PostgreSql, template: str) -> None:
    url = server.database(template)
    with Catalogue(url, retry_seconds=0) as catalogue:
        server.stop()
        try:
            with pytest.raises(Unavailable, match="does not answer"):
                catalogue.list()
            with pytest.raises(Unavailable, match="does not answer"):
                Catalogue(url, retry_seconds=0)
        finally:
            server.start()
        assert catalogue.list().total == 0


def test_what_our_role_may_not_do_is_no_damage(server: PostgreSql, template: str) -> None:
    url = server.database(template)
    with Catalogue(url) as catalogue:
        catalogue.database.write(lambda one: one.exec_driver_sql("CREATE ROLE guest LOGIN"))
    with pytest.raises(Unavailable, match="refused a statement: permission denied"):
        Catalogue(url.replace("postgres@", "guest@"), retry_seconds=0)


def test_password_is_not_shown(server: PostgreSql) -> None:
    url = server.url("absent").replace("postgres@", "postgres:hidden@")
    with pytest.raises(Unavailable, match="registry") as caught:
        Catalogue(url, retry_seconds=0)
    assert "hidden" not in str(caught.value)
    with pytest.raises(Failure, match="is in SQLite or in PostgreSQL") as refused:
        Catalogue("mysql://root:hidden@host/db")
    assert "hidden" not in str(refused.value)


def test_locked_file_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BUSY_SECONDS", 0.0)
    with Catalogue(f"sqlite:///{tmp_path}/r.db") as catalogue:
        other = sqlite3.connect(tmp_path / "r.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Unavailable, match=r"changed by others all the time|locked by another process"):
            catalogue.add(row(1))
        assert catalogue.list().total == 0
        other.execute("ROLLBACK")
        other.close()
        catalogue.add(row(1))


@pytest.mark.parametrize("size", [1 << 14, 100])
def test_file_that_is_no_database_is_damaged(tmp_path: Path, size: int) -> None:
    (tmp_path / "r.db").write_bytes(b"kyber" * size)
    with pytest.raises(RegistryDamaged, match="file is not a database"):
        Catalogue(f"sqlite:///{tmp_path}/r.db")


def test_file_that_is_torn_is_damaged(tmp_path: Path) -> None:
    with Catalogue(f"sqlite:///{tmp_path}/r.db") as catalogue:
        for number in range(40):
            catalogue.add(row(number))
    content = bytearray((tmp_path / "r.db").read_bytes())
    content[8192:] = b"\x5a" * (len(content) - 8192)
    (tmp_path / "r.db").write_bytes(content)
    with pytest.raises(RegistryDamaged), Catalogue(f"sqlite:///{tmp_path}/r.db") as catalogue:
        catalogue.list()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:///relative.db", "absolute path"),
        ("sqlite://", "absolute path"),
        ("sqlite:///:memory:", "absolute path"),
        ("", "cannot be understood"),
        ("registry.db", "cannot be understood"),
        ("postgresql+asyncpg://host/db", "in SQLite or in PostgreSQL"),
    ],
)
def test_url_that_names_no_registry_is_refused(url: str, words: str) -> None:
    with pytest.raises(Failure, match=words):
        Catalogue(url)


def test_file_is_roots_own(tmp_path: Path) -> None:
    with Catalogue(f"sqlite:///{tmp_path}/deep/r.db") as catalogue:
        catalogue.add(row(1))
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "deep").iterdir()} == {0o600}
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Unavailable, match="can be written to by other users"):
        Catalogue(f"sqlite:///{tmp_path}/open/r.db")
