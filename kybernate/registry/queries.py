"""The statements that read the registry, each given a connection."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Float, Select, and_, cast, exists, func, or_, select, tuple_

from kybernate.node.failure import Invalid
from kybernate.node.naming import SHORTEST_ID
from kybernate.registry.model import Filter, ImageRow, Page, TierTotals, Totals
from kybernate.registry.records import Record, image_of
from kybernate.registry.schema import IMAGE, LABEL, REPLICA, bounded
from kybernate_shim import bounded_json

CHUNK = 500  # keys in a statement
NEWEST = (IMAGE.c.created.desc(), IMAGE.c.key.desc())

Item = TypeVar("Item")


def page(connection: Connection, wanted: Filter, limit: int, token: str) -> Page:
    """Return at most `limit` images, newest first. Raises Invalid."""
    after = position_of(token, wanted)
    conditions = tuple(_conditions(wanted))
    total = connection.execute(select(func.count()).select_from(IMAGE).where(*conditions)).scalar_one()
    keys = select(IMAGE.c.key).where(*conditions).order_by(*NEWEST).limit(limit + 1)  # sorted without the wide columns
    if after is not None:
        keys = keys.where(tuple_(IMAGE.c.created, IMAGE.c.key) < tuple_(after.created, after.key))
    records = _records(connection, select(IMAGE).where(IMAGE.c.key.in_(keys)).order_by(*NEWEST))
    more, records = len(records) > limit, records[:limit]
    last = records[-1] if records else None
    token = token_of(Position(last["created"], last["key"]), wanted) if more and last else ""
    return Page(tuple(_with_replicas(connection, records)), token, total)


def by_keys(connection: Connection, keys: Iterable[str]) -> list[ImageRow]:
    """Return the images with these keys, newest first."""
    records = image_records(connection, keys)
    records.sort(key=lambda record: (record["created"], record["key"]), reverse=True)
    return list(_with_replicas(connection, records))


def image_records(connection: Connection, keys: Iterable[str], *, lock: bool = False) -> list[Record]:
    """Return the rows of the images with these keys, in any order; with `lock`, they are ours until the commit."""
    statement = select(IMAGE).order_by(IMAGE.c.key)  # all lock in one order
    if lock:
        statement = statement.with_for_update()
    return [
        record
        for some in chunks(sorted(set(keys)))
        for record in _records(connection, statement.where(IMAGE.c.key.in_(some)))
    ]


def label_records(connection: Connection, keys: Iterable[str]) -> list[Record]:
    """Return the rows of these images' labels."""
    return [
        record
        for some in chunks(sorted(set(keys)))
        for record in _records(connection, select(LABEL).where(LABEL.c.key.in_(some)))
    ]


def replica_records(connection: Connection, keys: Iterable[str]) -> list[Record]:
    """Return the rows of these images' replicas."""
    return [
        record
        for some in chunks(sorted(set(keys)))
        for record in _records(connection, select(REPLICA).where(REPLICA.c.image.in_(some)))
    ]


def replicas_of_node(connection: Connection, node: str) -> list[Record]:
    """Return the rows of all replicas of a node."""
    return _records(connection, select(REPLICA).where(REPLICA.c.node == node))


def places_without_origin(connection: Connection, node: str) -> list[str]:
    """Return where a node has images that were registered without their lineage."""
    statement = select(REPLICA.c.place).join(IMAGE, REPLICA.c.image == IMAGE.c.key)
    return list(connection.execute(statement.where(REPLICA.c.node == node, IMAGE.c.origin == "")).scalars())


def image_at(connection: Connection, replica: str) -> str | None:
    """Return the key of the image of a replica, None for one that is not registered."""
    return connection.execute(select(REPLICA.c.image).where(REPLICA.c.key == replica)).scalar()


def stale(connection: Connection, node: str) -> list[str]:
    """Return the keys of the images of a node with which older annotations are kept than the registry has."""
    return list(
        connection.execute(
            select(IMAGE.c.key)
            .distinct()
            .join(REPLICA, REPLICA.c.image == IMAGE.c.key)
            .where(REPLICA.c.node == node, REPLICA.c.revision < IMAGE.c.revision, IMAGE.c.id != "")
            .order_by(IMAGE.c.key)
        ).scalars()
    )


def orphans(connection: Connection) -> list[str]:
    """Return the keys of images without a replica, which only damage has made."""
    return list(connection.execute(select(IMAGE.c.key).where(_without_replica())).scalars())


def without_replica(connection: Connection, keys: Iterable[str]) -> list[str]:
    """Return which of the images have no replica left, once their rows are ours until the commit.

    Without the lock, of two agents that remove the last two replicas each would still see the other's.
    """
    wanted = sorted(set(keys))
    image_records(connection, wanted, lock=True)
    return [
        key
        for some in chunks(wanted)
        for key in connection.execute(select(IMAGE.c.key).where(IMAGE.c.key.in_(some), _without_replica())).scalars()
    ]


def maybe_named(connection: Connection, name: str) -> list[str]:
    """Return the keys of all images that a name may mean, with whatever kind of name; naming.py decides."""
    short, rest = bounded(name), bounded(name.partition("/")[2])
    kinds: list[Select[Any]] = [
        select(REPLICA.c.image).where(REPLICA.c.place == (str(Path(name)) if name.startswith("/") else name)),
        select(IMAGE.c.key).where(IMAGE.c.key == name),
        select(IMAGE.c.key).where(IMAGE.c.id == short),
        select(REPLICA.c.image).where(REPLICA.c.name.in_({short, rest})),
    ]
    if len(name) >= SHORTEST_ID:
        begins = func.substr(IMAGE.c.id, 1, len(name)) == name
        kinds.append(select(IMAGE.c.key).where(begins).limit(CHUNK))  # several are refused, however many they are
    return sorted({key for kind in kinds for key in connection.execute(kind).scalars()})


def lineage(connection: Connection, namespace: str, workload: str, container: str) -> list[ImageRow]:
    """Return the images of a workload's container, "" for all of its containers, newest generation first."""
    conditions = [IMAGE.c.namespace == bounded(namespace), IMAGE.c.workload == bounded(workload)]
    if container:
        conditions.append(_container(container))
    order = (func.coalesce(IMAGE.c.generation, -1).desc(), *NEWEST)
    return list(_with_replicas(connection, _records(connection, select(IMAGE).where(*conditions).order_by(*order))))


def related(connection: Connection, namespace: str, name: str, words: Collection[str], most: int) -> list[ImageRow]:
    """Return the newest images of a namespace that are of a pod, a pod's uid or an origin among `words`.

    With them, those that share their origin with the images called `name`, if that is not "".
    """
    family = {bounded(word) for word in words if word}
    if name:
        named = (
            select(IMAGE.c.origin)
            .join(REPLICA, REPLICA.c.image == IMAGE.c.key)
            .where(IMAGE.c.namespace == bounded(namespace), REPLICA.c.name == bounded(name), IMAGE.c.origin != "")
        )
        family |= set(connection.execute(named.limit(CHUNK)).scalars())
    kinds = (column.in_(sorted(family)) for column in (IMAGE.c.pod, IMAGE.c.pod_uid, IMAGE.c.origin))
    wanted = select(IMAGE).where(IMAGE.c.namespace == bounded(namespace), or_(*kinds)).order_by(*NEWEST).limit(most)
    return list(_with_replicas(connection, _records(connection, wanted)))


def newest_generation(connection: Connection, namespace: str, workload: str, container: str) -> int | None:
    """Return the highest generation of a workload's container, None where there is none."""
    statement = select(func.max(IMAGE.c.generation)).where(
        IMAGE.c.namespace == bounded(namespace), IMAGE.c.workload == bounded(workload), _container(container)
    )
    found: int | None = connection.execute(statement).scalar()
    return found


def children(connection: Connection, id: str) -> list[ImageRow]:
    """Return the images that build on the image with this id."""
    statement = select(IMAGE).where(IMAGE.c.parent == bounded(id)).order_by(*NEWEST)
    return list(_with_replicas(connection, _records(connection, statement)))


def totals(connection: Connection) -> Totals:
    """Return the sums of the whole registry."""
    sums = select(func.count(), _sum(IMAGE.c.bytes), _sum(IMAGE.c.vram_bytes)).select_from(IMAGE)
    images, size, vram = connection.execute(sums).one()
    pinned = connection.execute(select(func.count()).select_from(IMAGE).where(IMAGE.c.pinned)).scalar_one()
    states = connection.execute(select(REPLICA.c.state, func.count().label("images")).group_by(REPLICA.c.state))
    place = (REPLICA.c.node, REPLICA.c.tier)
    tiers = connection.execute(
        select(*place, func.count(), _sum(REPLICA.c.bytes)).group_by(*place).order_by(*place)
    ).all()
    return Totals(
        images,
        int(size),
        int(vram),
        pinned,
        {record.state: record.images for record in states},
        tuple(TierTotals(node, tier, count, int(bytes)) for node, tier, count, bytes in tiers),
    )


def chunks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield the items in parts that fit into one statement."""
    for begin in range(0, len(items), CHUNK):
        yield items[begin : begin + CHUNK]


def _conditions(wanted: Filter) -> Iterator[ColumnElement[bool]]:
    for column, text in (
        (IMAGE.c.namespace, wanted.namespace),
        (IMAGE.c.pod, wanted.pod),
        (IMAGE.c.workload, wanted.workload),
        (IMAGE.c.image, wanted.source_image),
    ):
        if text:
            yield column == bounded(text)
    if wanted.pinned:
        yield IMAGE.c.pinned
    for name, value in wanted.labels.items():
        yield IMAGE.c.key.in_(select(LABEL.c.key).where(LABEL.c.name == name, LABEL.c.value == value))
    places = ((REPLICA.c.tier, wanted.tier), (REPLICA.c.node, wanted.node))
    if held := [column == bounded(text) for column, text in places if text]:
        yield exists().where(REPLICA.c.image == IMAGE.c.key, *held)


def _container(container: str) -> ColumnElement[bool]:
    """Compare a container's name in its pod, and the id of one without a pod."""
    short = bounded(container)
    return or_(IMAGE.c.name == short, and_(IMAGE.c.name == "", IMAGE.c.container == short))


def _without_replica() -> ColumnElement[bool]:
    return ~exists().where(REPLICA.c.image == IMAGE.c.key)


def _sum(column: ColumnElement[int]) -> ColumnElement[float]:
    return func.coalesce(func.sum(cast(column, Float(53))), 0.0)


def _records(connection: Connection, statement: Select[Any]) -> list[Record]:
    result = connection.execute(statement)
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result.all()]  # three times as fast as `mappings`


def _with_replicas(connection: Connection, records: Sequence[Record]) -> Iterator[ImageRow]:
    found = defaultdict(list)
    for replica in replica_records(connection, (record["key"] for record in records)):
        found[replica["image"]].append(replica)
    return (image_of(record, found[record["key"]]) for record in records)


FORM = 1
CHECK = 12  # digits
LONGEST = 400


@dataclass(frozen=True)
class Position:
    """The last image of a page: images after it are older, or as old with a smaller key."""

    created: int
    key: str


def token_of(position: Position, wanted: Filter) -> str:
    """Return the token of the page after `position`."""
    body = json.dumps([FORM, position.created, position.key])
    return base64.urlsafe_b64encode(f"{_check(body, wanted)}{body}".encode()).decode().rstrip("=")


def position_of(token: str, wanted: Filter) -> Position | None:
    """Return where the page begins, None for the first one. Raises Invalid."""
    if not token:
        return None
    try:
        if len(token) > LONGEST:
            raise ValueError
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
        check, body = text[:CHECK], text[CHECK:]
        if check != _check(body, wanted):
            raise ValueError
        form, created, key = bounded_json.parse(body)
        if form != FORM or not isinstance(created, int) or not isinstance(key, str):
            raise ValueError
    except (ValueError, TypeError) as error:
        raise Invalid("the page token is not one of this list", advice="begin with the first page") from error
    return Position(created, key)


def _check(body: str, wanted: Filter) -> str:
    """Return what binds a token to its list; it finds mistakes, and keeps no secret."""
    *texts, labels, pinned = astuple(wanted)
    filter = json.dumps([texts, sorted(labels.items()), pinned])
    return sha256(f"kybernate page {filter} {body}".encode()).hexdigest()[:CHECK]
