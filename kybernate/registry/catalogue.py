"""The registry as the agent and the command line use it: typed values in and out, all calls blocking, from any thread.

A change of what no manifest says is written with the image's replicas on this node, and only then acknowledged. It is
the database's transaction that orders the writers of one image.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType

from sqlalchemy import Connection

from kybernate.node.failure import Ambiguous, Missing, Refused
from kybernate.node.naming import is_place, meant
from kybernate.node.reading import OnProgress
from kybernate.registry import changes, queries
from kybernate.registry import rebuild as rebuilding
from kybernate.registry.artefacts import Artefacts, this_node
from kybernate.registry.beside import Beside, keep, newest, stored, write
from kybernate.registry.database import RETRY_SECONDS, Database
from kybernate.registry.failures import IMAGE_NOT_REGISTERED_ADVICE, NotKeptBeside
from kybernate.registry.model import (
    Annotations,
    Filter,
    ImageRow,
    Page,
    RegisteredCopy,
    Replica,
    Totals,
    now,
    replica_key,
    require_labels,
)
from kybernate.registry.records import known_annotations, replica_record
from kybernate.registry.schema import bounded

PAGE = 100  # images, where a caller names no limit
MOST_IN_A_PAGE = 1000
SHOWN = 10
ON_DISK = ("complete", "damaged")  # states of replicas that something can be kept with


class Catalogue:
    """The registry at `url`, seen from `node`. Opening it brings its tables up to date.

    Raises Failure for a URL or tables that this release cannot use, Unavailable and RegistryDamaged; the latter
    two may also be raised by each call, and nothing was changed then.
    """

    def __init__(self, url: str, *, node: str = "", retry_seconds: float = RETRY_SECONDS) -> None:
        self.node = node or this_node()
        self.database = Database(url, retry_seconds=retry_seconds)

    def __enter__(self) -> Catalogue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    # ---- reading

    def get(self, name: str) -> ImageRow:
        """Return the image that a name means, as naming.py has it.

        Of several with the same name, those that are on this node count. Raises Missing and Ambiguous.
        """
        return self.database.read(lambda connection: self._one(connection, name))

    def copies(self, name: str) -> builtins.list[RegisteredCopy]:
        """Return all copies, on any node and in object stores, that a name means; none where it means nothing."""
        return self.database.read(lambda connection: self._copies(connection, name))

    def list(self, wanted: Filter | None = None, *, limit: int = 0, token: str = "") -> Page:
        """Return a page of images, newest first; `limit` 0 means PAGE, the most is MOST_IN_A_PAGE.

        Raises Invalid.
        """
        most = min(limit, MOST_IN_A_PAGE) if limit > 0 else PAGE
        return self.database.read(lambda connection: queries.page(connection, wanted or Filter(), most, token))

    def totals(self) -> Totals:
        """Return the sums of the whole registry."""
        return self.database.read(queries.totals)

    def generations(self, workload: str, *, namespace: str = "", container: str = "") -> tuple[ImageRow, ...]:
        """Return the images of a workload, of all its containers or of one, newest generation first."""
        return tuple(self.database.read(lambda connection: queries.lineage(connection, namespace, workload, container)))

    def related(self, namespace: str, name: str, words: Collection[str], *, most: int) -> tuple[ImageRow, ...]:
        """Return the newest images of a namespace that are of a pod, a pod's uid or an origin among `words`, and those
        of the origin of the images called `name`, "" for none.
        """
        return tuple(self.database.read(lambda connection: queries.related(connection, namespace, name, words, most)))

    def children(self, id: str) -> tuple[ImageRow, ...]:
        """Return the images that build on the one with this id."""
        return tuple(self.database.read(lambda connection: queries.children(connection, id)))

    # ---- images

    def add(self, row: ImageRow) -> ImageRow:
        """Insert an image with its replicas, or bring its rows up to date; return what is registered then.

        Facts and replicas are taken over. Annotations of a higher revision win; those of a new image get a generation
        and are kept with it. A replica whose directory had another image is that one's no more. Raises NotKeptBeside.
        """
        require_labels(row.annotations.labels)
        nodes = sorted({replica.node for replica in row.replicas})
        return self.database.write(lambda connection: self._add(connection, row), node=nodes[0] if nodes else self.node)

    def remove(self, name: str, *, force: bool = False) -> ImageRow:
        """Remove an image with all its replicas from the registry, and return what it was.

        The caller has removed the artefacts before: a rebuild brings back what is still there. Raises Missing,
        Ambiguous, and Refused for a pinned image unless `force`.
        """

        def work(connection: Connection) -> ImageRow:
            row = self._locked(connection, name)
            if row.annotations.pinned and not force:
                raise Refused(
                    f"image {row.name or row.id} is pinned", state="it was not removed", advice="remove the pin before"
                )
            changes.remove_images(connection, [row.key], replicas=True)
            return row

        return self.database.write(work, node=self.node)

    def pin(self, name: str, pinned: bool = True) -> ImageRow:
        """Pin an image, or remove the pin. Raises as `get` does, and NotKeptBeside."""
        return self._annotate(name, lambda known: replace(known, pinned=pinned))

    def label(self, name: str, labels: Mapping[str, str], removed: Iterable[str] = ()) -> ImageRow:
        """Set labels, and remove those with the names in `removed`. Raises Invalid, else as `pin`."""
        gone = frozenset(removed)

        def change(known: Annotations) -> Annotations:
            kept = {name: value for name, value in known.labels.items() if name not in gone}
            return replace(known, labels={**kept, **labels})

        return self._annotate(name, change)

    def used(self, name: str, seconds: float = 0.0, *, time: datetime | None = None) -> ImageRow:
        """Note that an image was restored now, in so many seconds, 0 where that is not known. Raises as `pin`."""
        when = time or now()

        def change(known: Annotations) -> Annotations:
            latest = max(when, known.last_used) if known.last_used else when
            return replace(known, last_used=latest, last_restore_seconds=seconds or known.last_restore_seconds)

        return self._annotate(name, change)

    # ---- replicas

    def put_replica(self, name: str, replica: Replica) -> ImageRow:
        """Add a replica to an image, or replace what is said of the one at its place. Raises as `get` does."""

        def work(connection: Connection) -> ImageRow:
            row = self._locked(connection, name)
            self._put_replica(connection, row.key, replica)
            return self._by_key(connection, row.key)

        return self.database.write(work, node=replica.node)

    def checked(
        self, place: str, damage: str = "", *, node: str | None = None, time: datetime | None = None
    ) -> ImageRow:
        """Note that all digests of a replica were compared: `damage` says what differs, "" that it is whole.

        Raises Missing, and NotKeptBeside for one of this node.
        """
        holder, when = self._holder_of(node), time or now()

        def work(connection: Connection) -> ImageRow:
            row = self._at(connection, holder, place)
            (known,) = (one for one in row.replicas if (one.node, one.place) == (holder, place))
            findings = tuple(word for word in known.findings if word != "damaged") + (("damaged",) if damage else ())
            now_known = replace(known, verified=when, state="damaged" if damage else "complete", findings=findings)
            now_known = replace(now_known, reason=damage or (known.reason if findings else ""))
            if self._is_here(now_known) and row.id:
                write(Path(place), replace(stored(Path(place), row.id), verified=when, damage=damage))
            self._put_replica(connection, row.key, now_known)
            return self._by_key(connection, row.key)

        return self.database.write(work, node=holder)

    def drop_replica(self, place: str, *, node: str | None = None) -> None:
        """Remove a replica of this node, or of `node`, if there is one; an image goes with its last one."""
        holder = self._holder_of(node)

        def work(connection: Connection) -> None:
            images = changes.remove_replicas(connection, [replica_key(holder, place)])
            changes.remove_images(connection, queries.without_replica(connection, images))

        self.database.write(work, node=holder)

    def places(self, node: str) -> tuple[str, ...]:
        """Return where a node, or with "" object stores, have images."""
        records = self.database.read(lambda connection: queries.replicas_of_node(connection, node))
        return tuple(record["place"] for record in records)

    def places_without_origin(self, node: str) -> tuple[str, ...]:
        """Return those places where an older release has registered an image, which kept nothing of its lineage."""
        return tuple(self.database.read(lambda connection: queries.places_without_origin(connection, node)))

    # ---- the registry as an index

    def rebuild(self, artefacts: Artefacts, progress: OnProgress = lambda done, total: None) -> rebuilding.Rebuilt:
        """Make the rows of a node again from its artefacts; see rebuild.py."""
        return rebuilding.rebuild(self.database, artefacts, progress)

    def check(self, artefacts: Artefacts, progress: OnProgress = lambda done, total: None) -> rebuilding.Rebuilt:
        """Return where the registry differs from a node's artefacts."""
        return rebuilding.check(self.database, artefacts, progress)

    def write_beside(self) -> int:
        """Write what other nodes have changed of this node's images; return of how many. Raises NotKeptBeside."""

        def work(connection: Connection) -> int:
            stale = queries.stale(connection, self.node)
            for key in stale:
                self._keep(connection, self._locked_key(connection, key))
            return len(stale)

        return self.database.write(work, node=self.node)

    # ---- inside of transactions

    def _copies(self, connection: Connection, name: str) -> builtins.list[RegisteredCopy]:
        rows = queries.by_keys(connection, queries.maybe_named(connection, name))
        copies = [RegisteredCopy(row, replica) for row in rows for replica in row.replicas]
        return meant(name if is_place(name) else bounded(name), copies, RegisteredCopy.names)

    def _one(self, connection: Connection, name: str) -> ImageRow:
        copies = self._copies(connection, name)
        if not any(copy.row.id == name for copy in copies):  # an id is not given up for a name that is like it
            copies = [copy for copy in copies if copy.replica.node == self.node] or copies
        found = list({copy.row.key: copy.row for copy in copies}.values())
        if not found:
            raise Missing(f"the registry has no image {name!r}", advice=IMAGE_NOT_REGISTERED_ADVICE)
        if len(found) > 1:
            raise Ambiguous(
                f"{name!r} is the name of {len(found)} images: {_listed(copies)}",
                advice="name one of them by its id or its place, which is a directory or a URL",
            )
        return found[0]

    def _locked(self, connection: Connection, name: str) -> ImageRow:
        return self._locked_key(connection, self._one(connection, name).key)

    def _locked_key(self, connection: Connection, key: str) -> ImageRow:
        """Return the image as it is once its row is ours until the commit."""
        if not queries.image_records(connection, [key], lock=True):
            raise Missing(f"image {key} was removed from the registry just now", advice=IMAGE_NOT_REGISTERED_ADVICE)
        return self._by_key(connection, key)

    def _by_key(self, connection: Connection, key: str) -> ImageRow:
        (row,) = queries.by_keys(connection, [key])
        return row

    def _at(self, connection: Connection, node: str, place: str) -> ImageRow:
        key = queries.image_at(connection, replica_key(node, place))
        if key is None:
            raise Missing(f"the registry has no image at {place} on node {node}", advice=IMAGE_NOT_REGISTERED_ADVICE)
        return self._locked_key(connection, key)

    def _holder_of(self, node: str | None) -> str:
        return self.node if node is None else node  # "" is an object store's

    def _annotate(self, name: str, change: Callable[[Annotations], Annotations]) -> ImageRow:
        def work(connection: Connection) -> ImageRow:
            row = self._locked(connection, name)
            known = self._known(connection, row)
            changed = change(known)
            require_labels(changed.labels)
            if changed == row.annotations:
                return row
            row = replace(row, annotations=replace(changed, revision=known.revision + 1))
            self._keep(connection, row)
            changes.put_annotations(connection, row)
            return self._by_key(connection, row.key)

        return self.database.write(work, node=self.node)

    def _known(self, connection: Connection, row: ImageRow) -> Annotations:
        """Return the annotations of a row, and those kept with the image where the row was damaged."""
        (record,) = queries.image_records(connection, [row.key])
        if (known := known_annotations(record)) is not None:
            return known
        return newest(*(stored(Path(one.place), row.id).annotations for one in row.replicas if self._is_here(one)))

    def _keep(self, connection: Connection, row: ImageRow, *, but_gone: bool = False) -> None:
        """Write an image's annotations with its replicas of this node; where one fails, all are as before.

        With `but_gone`, a replica whose directory is gone is passed over: it was evicted just now.
        """
        done: list[tuple[Path, Beside]] = []
        here = [one for one in row.replicas if self._is_here(one) and row.id]
        try:
            for one in [one for one in here if not but_gone or Path(one.place).is_dir()]:
                if one.revision != row.annotations.revision:
                    done.append((Path(one.place), stored(Path(one.place), row.id)))
                    keep(Path(one.place), row.id, row.annotations)
                    changes.set_revision(connection, one, row.annotations.revision)
        except NotKeptBeside:
            for directory, before in done[:-1]:
                _restore(directory, before)
            raise

    def _is_here(self, replica: Replica) -> bool:
        return replica.node == self.node and replica.place.startswith("/") and replica.state in ON_DISK

    def _add(self, connection: Connection, row: ImageRow) -> ImageRow:
        known = queries.image_records(connection, [row.key], lock=True)
        registered = known_annotations(known[0]) if known else None
        annotations = newest(row.annotations, *([registered] if registered else []))
        if not annotations.revision:
            annotations = self._first(connection, row)
        row = replace(row, annotations=annotations)
        changes.put_image(connection, row)
        for replica in row.replicas:
            self._put_replica(connection, row.key, replica)
        row = self._by_key(connection, row.key)
        self._keep(connection, row, but_gone=True)
        return self._by_key(connection, row.key)

    def _first(self, connection: Connection, row: ImageRow) -> Annotations:
        """Return the annotations of a new image, with its generation."""
        if not row.manifest_digest:
            return row.annotations
        container = row.source.name or row.source.container
        lineage = (row.source.namespace, row.workload, container)
        self.database.lock(connection, "lineage", *lineage)  # two agents give different generations
        last = queries.newest_generation(connection, *lineage)
        return replace(row.annotations, revision=1, generation=0 if last is None else last + 1)

    def _put_replica(self, connection: Connection, key: str, replica: Replica) -> None:
        record = replica_record(key, replica)
        before = queries.image_at(connection, record["key"])
        changes.put_replica(connection, record)
        if before is not None and before != key:
            changes.remove_images(connection, queries.without_replica(connection, [before]))


def every(catalogue: Catalogue, wanted: Filter) -> Iterator[ImageRow]:
    """Yield all images, newest first, page by page. Raises as `Catalogue.list`."""
    token = ""
    while True:
        page = catalogue.list(wanted, limit=MOST_IN_A_PAGE, token=token)
        yield from page.images
        if not (token := page.token):
            return


def _restore(directory: Path, before: Beside) -> None:
    try:
        write(directory, before)
    except NotKeptBeside:
        pass  # the first error is reported; a rebuild takes over what stands there


def _listed(copies: Sequence[RegisteredCopy]) -> str:
    places = [copy.replica.place for copy in copies]
    more = f", and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(places[:SHOWN]) + more
