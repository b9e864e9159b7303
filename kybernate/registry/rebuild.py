"""Makes the rows of one node again from its artefacts, or says where they differ.

A node's images are the truth of its replicas, of the facts of these images, and of what is kept with them. What only
other nodes or an object store can see is left as it is. Annotations that were changed from elsewhere, and are not yet
with the image, have a higher revision in the database, and are then written there.

All is done in one transaction: other readers see the registry as it was, or as it is afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection

from kybernate.node.reading import OnProgress
from kybernate.registry import changes, queries
from kybernate.registry.artefacts import Artefacts, Found, Scan, unchanged
from kybernate.registry.beside import keep, newest
from kybernate.registry.database import Database
from kybernate.registry.failures import NotKeptBeside
from kybernate.registry.model import Annotations, replica_key
from kybernate.registry.records import Record, image_record, known_annotations, replica_record
from kybernate.registry.schema import IMAGE, REPLICA

DifferenceKind = Literal["not registered", "gone", "changed", "without replica", "not kept with it"]
IMAGE_FIELDS = tuple(IMAGE.c.keys())
REPLICA_FIELDS = tuple(REPLICA.c.keys())


@dataclass(frozen=True)
class Difference:
    """Where registry and artefacts differ. `subject` is a directory, or the key of an image; `fields` are columns."""

    kind: DifferenceKind
    subject: str
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild or a check has found. `images` counts the node's; `damaged` those that cannot be restored.

    `unwritten` are reasons why annotations could not be kept with images; `unreadable` are directories below which
    the registry was left as it is.
    """

    images: int
    damaged: int
    differences: tuple[Difference, ...]
    unreadable: Mapping[Path, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()


@dataclass
class Rows:
    """Rows of the tables, by their keys. `labels` are the values by names of each image."""

    images: dict[str, Record] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    replicas: dict[str, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class _Plan:
    """How rows become what they have to be. `beside` are annotations that have to be kept with an image."""

    stored: Rows
    wanted: Rows
    orphans: tuple[str, ...]
    beside: tuple[tuple[Path, str, Annotations], ...]

    def differences(self) -> Iterator[Difference]:
        for key, record in self.wanted.replicas.items():
            old = self.stored.replicas.get(key)
            if old is None:
                yield Difference("not registered", record["place"])
            elif changed := _changed(old, record, REPLICA_FIELDS):
                yield Difference("changed", record["place"], changed)
        for key in self.stored.replicas.keys() - self.wanted.replicas.keys():
            yield Difference("gone", self.stored.replicas[key]["place"])
        for key, record in self.wanted.images.items():
            if (old := self.stored.images.get(key)) is not None:
                changed = _changed(old, record, IMAGE_FIELDS)
                if self.stored.labels.get(key, {}) != self.wanted.labels[key]:
                    changed += ("labels",)
                if changed:
                    yield Difference("changed", key, changed)
        yield from (Difference("without replica", key) for key in self.orphans)
        yield from (Difference("not kept with it", str(directory)) for directory, _, _ in self.beside)


def rebuild(database: Database, artefacts: Artefacts, progress: OnProgress = lambda done, total: None) -> Rebuilt:
    """Make the node's rows again. Raises Refused, Failure; nothing is changed then."""
    scan = artefacts.scan(progress)

    def work(connection: Connection) -> Rebuilt:
        plan, found = _planned(connection, artefacts, scan, lock=True)
        outcome = _outcome(plan, found, scan)
        if plan.beside:
            outcome = replace(outcome, unwritten=tuple(_keep_beside(plan.beside)))
            plan, _ = _planned(connection, artefacts, scan, lock=True)  # with what is kept with the images now
        _apply(connection, plan)
        if outcome.differences:
            changes.refresh_statistics(connection)
        return outcome

    return database.write(work, node=artefacts.node, alone=True)


def check(database: Database, artefacts: Artefacts, progress: OnProgress = lambda done, total: None) -> Rebuilt:
    """Compare the node's rows with its artefacts, and change nothing. Raises as `rebuild`."""
    scan = artefacts.scan(progress)

    def work(connection: Connection) -> Rebuilt:
        plan, found = _planned(connection, artefacts, scan, lock=False)
        return _outcome(plan, found, scan)

    return database.read(work)


def _outcome(plan: _Plan, found: Sequence[Found], scan: Scan) -> Rebuilt:
    damaged = sum(one.replica.state == "damaged" for one in found)
    differences = sorted(plan.differences(), key=lambda one: (one.subject, one.kind))
    return Rebuilt(len(found), damaged, tuple(differences), scan.unreadable)


def _planned(connection: Connection, artefacts: Artefacts, scan: Scan, *, lock: bool) -> tuple[_Plan, list[Found]]:
    """Compare the artefacts, as they are now, with the rows; with `lock`, no other transaction changes these rows."""
    replicas = queries.replicas_of_node(connection, artefacts.node)
    found = _current(artefacts, scan, (record["place"] for record in replicas))
    stored = _stored(connection, replicas, found, lock=lock)
    kept_rows = [record for record in replicas if _below(record["place"], scan.unreadable)]
    wanted, beside = _wanted(stored, found, kept_rows)
    orphans = tuple(key for key in queries.orphans(connection) if key not in wanted.images)
    return _Plan(stored, wanted, orphans, beside), found


def _current(artefacts: Artefacts, scan: Scan, registered: Iterable[str]) -> list[Found]:
    """Return what was found, with those looked at again that were changed, added or removed after the scan.

    Agents change the registry after the artefacts. So what they have changed before our transaction is seen here, and
    what they change later waits for its end.
    """
    current = [
        one if same else artefacts.look(one.directory)
        for one, same in zip(scan.found, unchanged(scan.found), strict=True)
    ]
    scanned = {one.replica.place for one in scan.found}
    current += [artefacts.look(Path(place)) for place in sorted(set(registered) - scanned) if _may_be_ours(place, scan)]
    return [one for one in current if one is not None]


def _may_be_ours(place: str, scan: Scan) -> bool:
    return place.startswith("/") and not _below(place, scan.unreadable)


def _below(place: str, directories: Iterable[Path]) -> bool:
    return any(Path(place).is_relative_to(directory) for directory in directories)


def _stored(connection: Connection, replicas: Sequence[Record], found: Sequence[Found], *, lock: bool) -> Rows:
    keys = {record["image"] for record in replicas} | {one.row.key for one in found}
    images = {record["key"]: record for record in queries.image_records(connection, keys, lock=lock)}
    labels: dict[str, dict[str, str]] = defaultdict(dict)
    for record in queries.label_records(connection, keys):
        labels[record["key"]][record["name"]] = record["value"]
    return Rows(images, labels, {record["key"]: record for record in replicas})


def _wanted(
    stored: Rows, found: Sequence[Found], kept: Sequence[Record]
) -> tuple[Rows, tuple[tuple[Path, str, Annotations], ...]]:
    """Return the rows as the artefacts want them, and the annotations that are newer than those kept with an image."""
    wanted = Rows(replicas={record["key"]: record for record in kept})
    groups: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        groups[one.row.key].append(one)
    beside: list[tuple[Path, str, Annotations]] = []
    for key, copies in groups.items():
        annotations = _annotations(stored.images.get(key), copies)
        wanted.images[key] = image_record(replace(copies[0].row, annotations=annotations))
        wanted.labels[key] = dict(annotations.labels)
        for one in copies:
            stale = annotations.revision > one.replica.revision
            if stale and one.row.id:
                beside.append((one.directory, one.row.id, annotations))
            wanted.replicas[replica_key(one.replica.node, one.replica.place)] = replica_record(key, one.replica)
    return wanted, tuple(beside)


def _annotations(stored: Record | None, copies: Sequence[Found]) -> Annotations:
    """Return the newest annotations; those kept with an image win over a row of the same revision."""
    registered = known_annotations(stored) if stored is not None else None
    ordered = sorted(copies, key=lambda one: one.replica.place)
    return newest(*(one.row.annotations for one in ordered), *([registered] if registered else []))


def _changed(old: Record, new: Record, fields: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in fields if old[name] != new[name])


def _apply(connection: Connection, plan: _Plan) -> None:
    """Write the rows that differ: images before the replicas that name them, and those left over at the end."""
    stored, wanted = plan.stored, plan.wanted
    changes.put_rows(connection, IMAGE, stored.images, wanted.images)
    labels = {key: values for key, values in wanted.labels.items() if stored.labels.get(key, {}) != values}
    changes.put_labels(connection, labels)
    changes.put_rows(connection, REPLICA, stored.replicas, wanted.replicas)
    changes.remove_replicas(connection, stored.replicas.keys() - wanted.replicas.keys())
    changes.remove_images(connection, {*queries.without_replica(connection, stored.images), *plan.orphans})


def _keep_beside(pending: Iterable[tuple[Path, str, Annotations]]) -> Iterator[str]:
    """Write annotations into images' directories, and yield why that was impossible: they stay in the database then."""
    for directory, id, newer in pending:
        try:
            keep(directory, id, newer)
        except NotKeptBeside as error:
            yield str(error)
