"""A PostgreSQL server of Debian's for tests: a private cluster in a temporary directory, reached by a UNIX socket."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from sqlalchemy import Connection, create_engine, delete, text

from kybernate.registry.schema import METADATA

PROGRAMS = Path("/usr/lib/postgresql")
USER = "postgres"
SETTINGS = "-c listen_addresses= -c fsync=off -c full_page_writes=off -c max_connections=60"


def empty(connection: Connection) -> None:
    """Remove all rows of a registry."""
    for table in reversed(METADATA.sorted_tables):
        connection.execute(delete(table))


class PostgreSql:
    """A running cluster. Each `database()` is a new one, empty."""

    def __init__(self, directory: Path, programs: Path) -> None:
        self._directory, self._programs = directory, programs
        self._numbers = count()
        self._run("initdb", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "-D", self._data)
        self.start()

    @property
    def _data(self) -> str:
        return str(self._directory / "data")

    def start(self) -> None:
        options = f"-k {self._directory} {SETTINGS}"
        self._run("pg_ctl", "-w", "-s", "-D", self._data, "-l", str(self._directory / "log"), "-o", options, "start")

    def stop(self) -> None:
        """End the server as a crash would."""
        self._run("pg_ctl", "-w", "-s", "-D", self._data, "-m", "immediate", "stop")

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self._directory}"

    def database(self, template: str = "template0") -> str:
        """Return the URL of a new database, a copy of `template`."""
        name = f"registry{next(self._numbers)}"
        engine = create_engine(
            self.url("postgres").replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
        engine.dispose()
        return self.url(name)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments],
            user=USER,
            group=pwd.getpwnam(USER).pw_gid,
            extra_groups=(),
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe would stay open as long as the server
            stderr=subprocess.STDOUT,
            check=False,
        )
        log = self._directory / "log"
        assert done.returncode == 0, f"{program}: {done.returncode}\n{log.read_text() if log.exists() else ''}"


@contextmanager
def postgresql() -> Iterator[PostgreSql]:
    """Run a cluster until the body ends."""
    programs = max(PROGRAMS.glob("*/bin"))
    directory = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # a socket's address is short
    shutil.chown(directory, USER)
    try:
        server = PostgreSql(directory, programs)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
