"""The tables are made and upgraded at the start, once, by one of those that start; a newer release's are left alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from kybernate.node.failure import Failure
from kybernate.registry import migrate
from kybernate.registry.catalogue import Catalogue
from kybernate.registry.database import Database
from kybernate.registry.failures import RegistryDamaged
from kybernate.registry.model import Filter
from kybernate.registry.schema import HEAD, METADATA
from tests.contract.registry.rows import labelled

FIRST = "r0001"
STARTS = 6


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "kybernate.registry:migrations")
    return ScriptDirectory.from_config(config)


def execute(url: str, *statements: str, **values: Any) -> None:
    database = Database(url)
    for statement in statements:
        database.write(lambda connection, statement=statement: connection.execute(text(statement), values))  # type: ignore[misc]
    database.close()


def test_newest_revision_is_the_one_of_the_tables(empty_url: str) -> None:
    assert scripts().get_heads() == [HEAD]
    database = Database(empty_url)
    assert database.revision() == HEAD
    assert database.read(lambda one: compare_metadata(MigrationContext.configure(one), METADATA)) == []
    database.close()


def test_first_revision_with_rows_is_upgraded(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = command.upgrade
    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", lambda config, revision: upgrade(config, FIRST))
        old = Database(empty_url)
    assert old.revision() == FIRST
    image = labelled(1, {"team": "a"}).annotations
    kept = {"revision": 7, "labels": [{"name": "team", "value": "a"}], "pinned": True}
    values = {
        "key": f"sha256:{'1' * 64}", "id": "0001", "created": 5, "namespace": "shop", "pod": "web-0",
        "container": "c", "name": "app", "image": "i", "image_digest": "", "node": "n", "bytes": 3, "vram_bytes": 4,
        "encrypted": False, "gpus": "[]", "annotations": json.dumps(kept), "pinned": True, "workload": "web-0",
        "parent": "", "generation": 0, "last_used": None, "last_restore_seconds": 0.0,
    }  # fmt: skip
    broken = {**values, "key": f"sha256:{'2' * 64}", "id": "0002", "annotations": "{"}
    replica = {
        "key": "1" * 64, "image": values["key"], "node": "n", "place": "/p", "tier": "disk", "name": "first",
        "state": "complete", "bytes": 3, "verified": None, "findings": "[]", "reason": "",
    }  # fmt: skip
    other = {**replica, "key": "2" * 64, "image": broken["key"], "place": "/q", "name": "second"}
    label = {"key": values["key"], "name": "team", "value": "a"}
    rows = (("image", values), ("image", broken), ("replica", replica), ("replica", other), ("label", label))
    for table, row in rows:
        columns = ", ".join(row)
        statement = text(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(f':{name}' for name in row)})")
        old.write(lambda connection, statement=statement, row=row: connection.execute(statement, row))  # type: ignore[misc]
    old.close()
    with Catalogue(empty_url, node="elsewhere") as catalogue:
        assert catalogue.database.revision() == HEAD
        found = catalogue.get("first")
        assert (found.bytes, found.source.pod, found.replicas[0].place) == (3, "web-0", "/p")
        assert (found.annotations.revision, found.annotations.pinned) == (7, True)
        assert found.annotations.labels == image.labels
        assert catalogue.list(Filter(labels={"team": "a"}, pinned=True)).images == (found,)
        assert catalogue.get("0002").annotations.revision == 0
        assert catalogue.label("first", {"new": "1"}).annotations.revision == 8


def test_concurrent_starts_migrate_once(empty_url: str) -> None:
    together = Barrier(STARTS)

    def start(number: int) -> str:
        together.wait()
        database = Database(empty_url)
        revision = database.revision()
        database.close()
        return revision

    with ThreadPoolExecutor(STARTS) as pool:
        assert list(pool.map(start, range(STARTS))) == [HEAD] * STARTS
    Catalogue(empty_url).close()


def test_failed_migration_leaves_nothing(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = command.upgrade

    def fail(config: Config, revision: str) -> None:
        upgrade(config, FIRST)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", fail)
        with pytest.raises(KeyboardInterrupt):
            Database(empty_url)
        patch.setattr(Database, "_migrate", lambda self: None)
        database = Database(empty_url)
        assert database.read(lambda connection: inspect(connection).get_table_names()) == []
        database.close()
    Catalogue(empty_url).close()


def test_tables_of_a_newer_release_are_refused(fresh_url: str) -> None:
    execute(fresh_url, "UPDATE alembic_version SET version_num = 'r9999'")
    with pytest.raises(Failure, match="revision r9999.*up to " + HEAD) as caught:
        Catalogue(fresh_url)
    assert caught.value.state == "nothing was changed"


def test_other_programs_tables_are_refused(fresh_url: str) -> None:
    execute(fresh_url, "DROP TABLE alembic_version")
    with pytest.raises(RegistryDamaged, match="tables image, label, replica of another program"):
        Catalogue(fresh_url)


def test_two_revisions_at_once_are_damage(fresh_url: str) -> None:
    execute(fresh_url, "INSERT INTO alembic_version VALUES ('r0001')")
    with pytest.raises(RegistryDamaged, match="2 revisions"):
        Catalogue(fresh_url)


def test_no_revision_has_a_way_back() -> None:
    for script in scripts().walk_revisions():
        with pytest.raises(Failure, match="never changed back"):
            script.module.downgrade()
    assert migrate.downgrade is not None
