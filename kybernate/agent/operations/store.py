"""The operations' tables in the agent's journal. Each function is one transaction, on the disk when it returns.

The rules that must hold whatever the program does are in SQL: an ended operation never changes, states change as MOVES
has it, and one key means one operation.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any, TypeVar

from kybernate.agent.journal import Journal, JournalUnusable
from kybernate.agent.operations.submission import OPERATION_NOT_FOUND_ADVICE, TOO_MANY_OPERATIONS_ADVICE
from kybernate.node.failure import Claimed, Exhausted, Missing
from kybernate.verbs.model import FINAL, MOVES, Arguments, Fault, Operation, Result, State, Step, Submission, Target

DEFAULT_LIST = 100
MOST_LIST = 1000


def _quoted(states: Iterable[State]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


_FINAL = _quoted(FINAL)
_MOVES = " OR ".join(f"(OLD.state = '{old}' AND NEW.state IN ({_quoted(to)}))" for old, to in MOVES.items())
_BEYOND = """SELECT number FROM (SELECT number,
        row_number() OVER (PARTITION BY namespace, container ORDER BY number DESC) AS place
    FROM operations WHERE ended IS NOT NULL AND container != '') WHERE place > ?"""
SCHEMA = (
    f"""CREATE TABLE IF NOT EXISTS operations (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        verb TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ({_quoted(State)})),
        namespace TEXT NOT NULL, container TEXT NOT NULL, title TEXT NOT NULL, other TEXT NOT NULL,
        writes TEXT NOT NULL,
        created REAL NOT NULL, started REAL, ended REAL, deadline REAL,
        revision INTEGER NOT NULL,
        record TEXT NOT NULL,
        CHECK ((ended IS NOT NULL) = (state IN ({_FINAL})))
    ) STRICT""",
    f"CREATE INDEX IF NOT EXISTS operations_unfinished ON operations (number) WHERE state NOT IN ({_FINAL})",
    "CREATE INDEX IF NOT EXISTS operations_ended ON operations (ended)",
    f"""CREATE UNIQUE INDEX IF NOT EXISTS operations_writes ON operations (writes)
        WHERE writes != '' AND state NOT IN ({_FINAL})""",
    f"""CREATE TRIGGER IF NOT EXISTS operations_ended_stay BEFORE UPDATE ON operations WHEN OLD.state IN ({_FINAL})
        BEGIN SELECT RAISE(ABORT, 'an operation that has ended does not change'); END""",
    f"""CREATE TRIGGER IF NOT EXISTS operations_move BEFORE UPDATE ON operations
        WHEN OLD.state NOT IN ({_FINAL}) AND NOT ({_MOVES})
        BEGIN SELECT RAISE(ABORT, 'an operation cannot change its state so'); END""",
    """CREATE TABLE IF NOT EXISTS operation_keys (
        scope TEXT NOT NULL, key TEXT NOT NULL, request TEXT NOT NULL, operation TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (scope, key)
    ) STRICT""",
)

Record = TypeVar("Record")
Verbs = Mapping[str, type[Arguments]]  # by the names that the journal has


@dataclass(frozen=True)
class Wanted:
    """Which operations a list has: newest first, of these states (all if empty), of a container by id or name."""

    states: Collection[State] = ()
    container: str = ""
    limit: int = 0
    before: str = ""


class Store:
    """The tables. Every method raises JournalUnusable where the journal cannot be read or written."""

    def __init__(self, journal: Journal, verbs: Verbs) -> None:
        self._journal, self._verbs = journal, verbs

    async def find_key(self, submission: Submission) -> Operation | None:
        """Return the operation that the request's key means. Raises Claimed where it was another request's."""
        return (
            await self._journal.run(lambda connection: _by_key(connection, submission, self._verbs))
            if submission.key
            else None
        )

    async def add(self, operation: Operation, submission: Submission, *, pending: int) -> Operation:
        """Journal a new operation and return it with its number; with a known key, return the operation it means.

        Raises Claimed and Exhausted where `pending` operations have not ended.
        """

        def work(connection: sqlite3.Connection) -> Operation:
            if submission.key and (known := _by_key(connection, submission, self._verbs)):
                return known
            _require_room(connection, pending)
            _require_unclaimed(connection, operation.target.writes)
            number = _insert(connection, operation)
            if submission.key:
                connection.execute(
                    "INSERT INTO operation_keys VALUES (?, ?, ?, ?, ?)",
                    (submission.scope, submission.key, fingerprint(submission), operation.id, operation.created),
                )
            return replace(operation, number=number)

        return await self._journal.run(work)

    async def write(self, operation: Operation) -> None:
        """Journal a change. Raises Missing where no operation of this id can change any more."""

        def work(connection: sqlite3.Connection) -> None:
            cursor = connection.execute(
                "UPDATE operations SET state = ?, started = ?, ended = ?, deadline = ?, revision = ?, record = ?"
                f" WHERE id = ? AND state NOT IN ({_FINAL})",
                (
                    operation.state,
                    operation.started,
                    operation.ended,
                    operation.deadline,
                    operation.revision,
                    encode(operation),
                    operation.id,
                ),
            )
            if cursor.rowcount != 1:
                raise Missing(
                    f"no operation {operation.id} could be changed: it has ended, or is not known",
                    advice=OPERATION_NOT_FOUND_ADVICE,
                )

        await self._journal.run(work)

    async def get(self, id: str) -> Operation:
        """Return one operation. Raises Missing."""

        def work(connection: sqlite3.Connection) -> Operation:
            row = connection.execute("SELECT * FROM operations WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise Missing(f"there is no operation {id!r}", advice=OPERATION_NOT_FOUND_ADVICE)
            return decode(row, self._verbs)

        return await self._journal.run(work)

    async def unfinished(self) -> list[Operation]:
        """Return all operations that have not ended, in the order of their submission."""

        def work(connection: sqlite3.Connection) -> list[Operation]:
            rows = connection.execute(f"SELECT * FROM operations WHERE state NOT IN ({_FINAL}) ORDER BY number")
            return [decode(row, self._verbs) for row in rows]

        return await self._journal.run(work)

    async def list(self, wanted: Wanted) -> Sequence[Operation]:
        """Return the operations that are wanted. An unknown `before` raises Missing."""
        return await self._journal.run(lambda connection: _listed(connection, wanted, self._verbs))

    async def last_id(self) -> str:
        """Return the id of the newest operation, "" where there is none."""

        def work(connection: sqlite3.Connection) -> str:
            row = connection.execute("SELECT id FROM operations ORDER BY number DESC LIMIT 1").fetchone()
            return str(row["id"]) if row else ""

        return await self._journal.run(work)

    async def prune(self, now: float, *, keep: float, keep_keys: float, keep_of_one: int) -> Sequence[Operation]:
        """Remove keys and operations that ended so many seconds ago, and return these operations.

        A key stays as long as its operation runs, and an operation as long as its key. Of what has ended, a container
        has its newest `keep_of_one` operations, with their keys.
        """

        def work(connection: sqlite3.Connection) -> Sequence[Operation]:
            beyond = f"SELECT id FROM operations WHERE number IN ({_BEYOND})"
            connection.execute(f"DELETE FROM operation_keys WHERE operation IN ({beyond})", (keep_of_one,))
            connection.execute(
                "DELETE FROM operation_keys WHERE created < ? AND NOT EXISTS (SELECT 1 FROM operations WHERE"
                " id = operation AND (ended IS NULL OR ended >= ?))",
                (now - keep_keys, now - keep_keys),
            )
            old = f"(ended < ? AND id NOT IN (SELECT operation FROM operation_keys)) OR number IN ({_BEYOND})"
            values = (now - keep, keep_of_one)
            rows = connection.execute(f"SELECT * FROM operations WHERE {old}", values).fetchall()
            connection.execute(f"DELETE FROM operations WHERE {old}", values)
            return [decode(row, self._verbs) for row in rows]

        return await self._journal.run(work)


def fingerprint(submission: Submission) -> str:
    """Return a digest of what a request asks for; requests with one key and different digests are not the same."""
    asked = [
        submission.arguments.verb,
        asdict(submission.arguments),
        submission.seconds,
        sorted(submission.labels.items()),
    ]
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def encode(operation: Operation) -> str:
    """Return what the columns do not hold of an operation, as JSON."""
    document = asdict(operation)
    for name in ("id", "number", "state", "created", "started", "ended", "deadline", "revision", "progress"):
        del document[name]
    return json.dumps(document)


def decode(row: sqlite3.Row | Mapping[str, Any], verbs: Verbs) -> Operation:
    """Return the operation of a row. Fields that a newer release has written are left out.

    Raises JournalUnusable where the record cannot be read: what it is about must not be forgotten.
    """
    try:
        return _decoded(row, json.loads(row["record"]), verbs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalUnusable(
            f"the record of operation {row['id']} in the journal cannot be read: {type(error).__name__}: {error}"
        ) from error


def _decoded(row: sqlite3.Row | Mapping[str, Any], document: dict[str, Any], verbs: Verbs) -> Operation:
    arguments = _made(verbs[row["verb"]], document["arguments"])
    result, fault = document["result"], document["fault"]
    return Operation(
        id=row["id"],
        arguments=arguments,
        target=_made(Target, document["target"]),
        created=row["created"],
        number=row["number"],
        state=State(row["state"]),
        requester=document["requester"],
        key=document["key"],
        scope=document["scope"],
        labels=document["labels"],
        deadline=row["deadline"],
        started=row["started"],
        ended=row["ended"],
        cause=document["cause"],
        boot=document["boot"],
        attempts=document["attempts"],
        steps=tuple(_made(Step, step) for step in document["steps"]),
        result=_result(result) if result else None,
        fault=_made(Fault, fault) if fault else None,
        notes=tuple(document["notes"]),
        revision=row["revision"],
    )


def _result(document: dict[str, Any]) -> Result:
    steps = tuple(_made(Step, step) for step in document.get("steps", ()))
    return replace(_made(Result, document), steps=steps)


def _made(kind: type[Record], document: Mapping[str, Any]) -> Record:
    """Return a dataclass of plain values and tuples of them, made of JSON."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # all callers pass dataclasses
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in document.items() if k in names})


def _by_key(connection: sqlite3.Connection, submission: Submission, verbs: Verbs) -> Operation | None:
    row = connection.execute(
        "SELECT operations.*, request FROM operation_keys JOIN operations ON operations.id = operation"
        " WHERE scope = ? AND key = ?",
        (submission.scope, submission.key),
    ).fetchone()
    if row is None:
        return None
    if row["request"] != fingerprint(submission):
        raise Claimed(
            f"the idempotency key {submission.key!r} belongs to operation {row['id']}, which is another request",
            state="no operation was started",
            advice="use a new key for each new request, and the same one only to repeat a request",
        )
    return decode(row, verbs)


def _require_room(connection: sqlite3.Connection, most: int) -> None:
    row = connection.execute(f"SELECT count(*) FROM operations WHERE state NOT IN ({_FINAL})").fetchone()
    if row[0] >= most:
        raise Exhausted(
            f"{row[0]} operations have not ended, and at most {most} are allowed",
            state="nothing was started",
            advice=TOO_MANY_OPERATIONS_ADVICE,
        )


def _require_unclaimed(connection: sqlite3.Connection, path: str) -> None:
    row = connection.execute(
        f"SELECT id, verb FROM operations WHERE writes = ? AND writes != '' AND state NOT IN ({_FINAL})", (path,)
    ).fetchone()
    if row is not None:
        raise Claimed(
            f"the {row['verb']} {row['id']} writes to {path}",
            state="no operation was started",
            advice="name another place, or wait for that operation",
        )


def _insert(connection: sqlite3.Connection, operation: Operation) -> int:
    target = operation.target
    cursor = connection.execute(
        "INSERT INTO operations (id, verb, state, namespace, container, title, other, writes, created, started, ended,"
        " deadline, revision, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            operation.id,
            operation.verb,
            operation.state,
            target.namespace,
            target.container,
            target.title,
            target.other,
            target.writes,
            operation.created,
            operation.started,
            operation.ended,
            operation.deadline,
            operation.revision,
            encode(operation),
        ),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _listed(connection: sqlite3.Connection, wanted: Wanted, verbs: Verbs) -> list[Operation]:
    conditions, values = ["1"], []
    if wanted.states:
        conditions.append(f"state IN ({', '.join('?' * len(wanted.states))})")
        values += [str(state) for state in wanted.states]
    if wanted.container:
        conditions.append("? IN (container, title, other)")
        values.append(wanted.container)
    if wanted.before:
        found = connection.execute("SELECT number FROM operations WHERE id = ?", (wanted.before,)).fetchone()
        if found is None:
            raise Missing(f"there is no operation {wanted.before!r}", advice=OPERATION_NOT_FOUND_ADVICE)
        conditions.append("number < ?")
        values.append(found["number"])
    limit = min(wanted.limit or DEFAULT_LIST, MOST_LIST)
    sql = f"SELECT * FROM operations WHERE {' AND '.join(conditions)} ORDER BY number DESC LIMIT {limit}"
    return [decode(row, verbs) for row in connection.execute(sql, values)]
