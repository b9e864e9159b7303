"""The statements that change the registry, each given a connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, insert, text, update
from sqlalchemy.dialects import postgresql, sqlite

from kybernate.registry.model import Annotations, ImageRow, Replica, replica_key
from kybernate.registry.queries import chunks
from kybernate.registry.records import Record, annotations_record, image_record, label_records
from kybernate.registry.schema import IMAGE, LABEL, REPLICA


def put_image(connection: Connection, row: ImageRow) -> None:
    """Insert an image with its labels, or set all that is said of it."""
    _upsert(connection, IMAGE, image_record(row))
    put_labels(connection, {row.key: row.annotations.labels})


def put_annotations(connection: Connection, row: ImageRow) -> None:
    """Set what an image's manifest says nothing of, or not alone."""
    values = annotations_record(row)
    connection.execute(update(IMAGE).where(IMAGE.c.key == row.key).values(values))
    put_labels(connection, {row.key: row.annotations.labels})


def put_labels(connection: Connection, labels: Mapping[str, Mapping[str, str]]) -> None:
    """Make these all labels of the images with these keys."""
    for some in chunks(sorted(labels)):
        connection.execute(delete(LABEL).where(LABEL.c.key.in_(some)))
    rows = [row for key, values in labels.items() for row in label_records(key, Annotations(labels=values))]
    if rows:
        connection.execute(insert(LABEL), rows)


def put_replica(connection: Connection, record: Record) -> None:
    """Insert a replica, or set all that is said of the one with its key."""
    _upsert(connection, REPLICA, record)


def set_revision(connection: Connection, replica: Replica, revision: int) -> None:
    """Note the revision of the annotations kept with a replica."""
    held = replica_key(replica.node, replica.place)
    connection.execute(update(REPLICA).where(REPLICA.c.key == held).values(revision=revision))


def remove_replicas(connection: Connection, keys: Iterable[str]) -> list[str]:
    """Remove the replicas with these keys; return the keys of their images."""
    images: list[str] = []
    for some in chunks(sorted(keys)):
        statement = delete(REPLICA).where(REPLICA.c.key.in_(some)).returning(REPLICA.c.image)
        images += connection.execute(statement).scalars()
    return images


def remove_images(connection: Connection, keys: Iterable[str], *, replicas: bool = False) -> None:
    """Remove the images with these keys and their labels, and with `replicas` those before."""
    for some in chunks(sorted(keys)):
        if replicas:
            connection.execute(delete(REPLICA).where(REPLICA.c.image.in_(some)))
        connection.execute(delete(IMAGE).where(IMAGE.c.key.in_(some)))


def put_rows(connection: Connection, table: Table, stored: Mapping[str, Record], wanted: Mapping[str, Record]) -> None:
    """Insert and update what differs. A row that another agent has inserted meanwhile makes the transaction repeat."""
    if new := [record for key, record in wanted.items() if key not in stored]:
        connection.execute(insert(table), new)
    changed = [record for key, record in wanted.items() if key in stored and stored[key] != record]
    if changed:
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in map(str, table.c.keys()) if name != "key"}
        statement = update(table).where(table.c.key == bindparam("old_key")).values(values)
        connection.execute(statement, [{"old_key": one["key"], **_prefixed(one)} for one in changed])


def refresh_statistics(connection: Connection) -> None:
    """Let PostgreSQL count again after many changes: until it does so by itself, it takes the tables for small ones.

    SQLite plans well without statistics.
    """
    if connection.dialect.name != "sqlite":
        tables = ", ".join(table.name for table in (IMAGE, LABEL, REPLICA))
        connection.execute(text(f"ANALYZE (SKIP_LOCKED) {tables}"))


def _prefixed(record: Record) -> Record:
    return {f"new_{name}": value for name, value in record.items() if name != "key"}


def _upsert(connection: Connection, table: Table, record: Mapping[str, Any]) -> None:
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table).values(dict(record))
    values = {name: statement.excluded[name] for name in record if name != "key"}
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_=values))
