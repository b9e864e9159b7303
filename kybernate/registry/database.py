"""The registry's database: SQLite or PostgreSQL, transactions that are tried again, and errors in our words.

A transaction is a function of a connection. It is executed again after a lost connection, a deadlock or a conflict, so
it must be one that can be: every one of ours sets values, or is guarded by a revision.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from kybernate.node.failure import Failure, Unavailable
from kybernate.registry.failures import (
    REGISTRY_BUSY_ADVICE,
    REGISTRY_UNREACHABLE_ADVICE,
    REGISTRY_URL_INVALID_ADVICE,
    RegistryDamaged,
)
from kybernate.registry.migrate import migrate, revision_of
from kybernate.registry.schema import HEAD
from kybernate_shim.errors import Refused
from kybernate_shim.linux.private_files import create_private
from kybernate_shim.trust.places import make_private

BUSY_SECONDS: Final = 10.0  # that another process may hold SQLite's file
RETRY_SECONDS: Final = 10.0  # that a server may be away, as it is while it restarts
PAUSE_SECONDS: Final = 0.1
CONFLICTS: Final = {"40001", "40P01", "23503", "23505"}  # serialization, deadlock, and races of rows of one image
STARTING: Final = {"57P01", "57P02", "57P03"}  # the server ends, has crashed, or comes up
IMPOSSIBLE: Final = ("42", "XX", "22", "23")  # tables that are not ours, corruption, values that no row has
DENIED: Final = "42501"  # what our role may not do
POSTGRESQL: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # milliseconds: a server that is cut off is noticed
    "prepare_threshold": None,  # poolers of connections know no prepared statements
    "application_name": "kybernate",
}

Result = TypeVar("Result")


class Database:
    """An open registry, whose tables are those of this release. May be used by several threads."""

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """Connect, and migrate. Raises Failure, Unavailable, RegistryDamaged."""
        self._url = _parsed(url)
        self._retry_seconds = retry_seconds
        self.is_sqlite = self._url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            _make_file(Path(self._url.database or ""))
        self._engine = self._new_engine()
        self._snapshots = self._engine if self.is_sqlite else self._engine.execution_options(**SNAPSHOT)
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """The URL, without its password."""
        return self._url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def revision(self) -> str:
        """Return the revision of the tables."""
        return self.read(revision_of)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Return what `work` finds; all its statements see the same state of the registry."""
        return self._tried(self._snapshots, work, write=False)

    def write(self, work: Callable[[Connection], Result], *, node: str = "", alone: bool = False) -> Result:
        """Execute `work` in a transaction, and return its result once that is kept.

        Those that name the same `node` exclude each other where one of them is `alone`.
        """

        def locked(connection: Connection) -> Result:
            if node:
                self.lock(connection, "node", node, shared=not alone)
            return work(connection)

        return self._tried(self._engine, locked, write=True)

    def lock(self, connection: Connection, *subject: str, shared: bool = False) -> None:
        """Exclude other transactions with the same subject until the commit, in SQLite all of them.

        `shared` excludes only those that are not shared.
        """
        if not self.is_sqlite:  # which has one writer anyway
            kind = "_shared" if shared else ""
            connection.execute(text(f"SELECT pg_advisory_xact_lock{kind}(:key)"), {"key": _lock_of(*subject)})

    def _tried(self, engine: Engine, work: Callable[[Connection], Result], *, write: bool) -> Result:
        until = time.monotonic() + self._retry_seconds
        while True:
            try:
                with self._reported(), _transaction(engine, write=write) as connection:
                    return work(connection)
            except _Again as again:
                if time.monotonic() >= until:
                    raise again.failure from again.__cause__
            time.sleep(PAUSE_SECONDS)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Translate a database's errors, and mark those after which the transaction is tried again."""
        try:
            yield
        except DBAPIError as error:
            raise self._in_our_words(error) from error
        except SQLAlchemyError as error:
            raise Unavailable(
                f"the registry {self.shown} cannot be used: {error}", advice=REGISTRY_UNREACHABLE_ADVICE
            ) from error

    def _in_our_words(self, error: DBAPIError) -> Exception:
        words = " ".join(str(error.orig).split())
        if isinstance(error.orig, sqlite3.Error):
            return _of_sqlite(error.orig, f"the registry {self.shown}", words)
        state = getattr(error.orig, "sqlstate", None)
        failure = Unavailable(f"the registry {self.shown} does not answer: {words}", advice=REGISTRY_UNREACHABLE_ADVICE)
        if error.connection_invalidated or state is None or state in STARTING:
            return _Again(failure)
        if state in CONFLICTS:
            return _Again(
                Unavailable(
                    f"the registry {self.shown} is changed by others all the time: {words}", advice=REGISTRY_BUSY_ADVICE
                )
            )
        if state != DENIED and state[:2] in IMPOSSIBLE:
            return RegistryDamaged(f"the registry {self.shown} is damaged: {words}")
        return Unavailable(
            f"the registry {self.shown} refused a statement: {words}", advice=REGISTRY_UNREACHABLE_ADVICE
        )

    def _new_engine(self) -> Engine:
        if not self.is_sqlite:
            return create_engine(self._url, pool_pre_ping=True, connect_args=dict(POSTGRESQL))
        engine = create_engine(self._url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
        event.listen(engine, "connect", _sqlite_connected)
        event.listen(engine, "begin", _sqlite_begin)
        return engine

    def _migrate(self) -> None:
        """Bring the tables up to date; where they are, nothing is locked."""
        found = self.read(revision_of)
        if found != HEAD:
            self.write(self._migrated)

    def _migrated(self, connection: Connection) -> None:
        self.lock(connection, "migration")
        migrate(connection)


SNAPSHOT: Final[dict[str, Any]] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class _Again(Exception):
    """The transaction may succeed if it is tried again; `failure` is what to raise if it does not."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


@contextmanager
def _transaction(engine: Engine, *, write: bool) -> Iterator[Connection]:
    with engine.connect() as connection:
        if write and engine.dialect.name == "sqlite":
            connection = connection.execution_options(begin="BEGIN IMMEDIATE")
        with connection.begin():
            yield connection


def _of_sqlite(error: sqlite3.Error, subject: str, words: str) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"{subject} is locked by another process: {words}", advice=REGISTRY_BUSY_ADVICE)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT):
        return RegistryDamaged(f"{subject} is damaged: {words}")
    return Unavailable(f"{subject} cannot be used: {words}", advice=REGISTRY_UNREACHABLE_ADVICE)


def _parsed(url: str) -> URL:
    """Return the URL with the driver that we have. Raises Failure."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise Failure(
            "the registry's URL cannot be understood", advice=REGISTRY_URL_INVALID_ADVICE
        ) from error  # it may contain a password
    shown = parsed.render_as_string(hide_password=True)
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        if find_spec("psycopg") is None:
            raise Failure(
                f"{shown} needs the driver of PostgreSQL", advice="install kybernate with its extra `postgresql`"
            )
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername != "sqlite":
        raise Failure(f"{shown}: the registry is in SQLite or in PostgreSQL", advice=REGISTRY_URL_INVALID_ADVICE)
    if not (parsed.database or "").startswith("/"):
        raise Failure(
            f"{shown}: a file of SQLite is named by an absolute path, after four slashes",
            advice=REGISTRY_URL_INVALID_ADVICE,
        )
    return parsed


def _make_file(path: Path) -> None:
    """Make SQLite's file root's own; what SQLite puts next to it has the same mode."""
    try:
        make_private(path.parent)
        if not path.exists():
            create_private(path, exclusive=True).close()
    except FileExistsError:
        pass  # another agent was faster
    except (Refused, OSError) as error:
        raise Unavailable(
            f"the registry's file {path} cannot be made: {error}", advice=REGISTRY_UNREACHABLE_ADVICE
        ) from error


def _sqlite_connected(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so, also around changes of tables
    _switch_to_wal(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Set the journal's mode, which is kept in the file; the switch itself does not wait for other processes."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(PAUSE_SECONDS)


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))


def _lock_of(*subject: str) -> int:
    """Return the key of an advisory lock, a number of 64 bits with a sign."""
    digest = sha256("\0".join(("kybernate registry", *subject)).encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
