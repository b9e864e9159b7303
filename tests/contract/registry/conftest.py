"""Every test of the registry runs over SQLite and over PostgreSQL."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kybernate.registry.catalogue import Catalogue
from tests.contract.registry.postgresql import PostgreSql, empty, postgresql

HERE = "node-a"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    with postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a new database without tables."""
    if kind == "sqlite":
        return f"sqlite:///{tempfile.mkdtemp(dir=tmp_path)}/registry.db"
    server: PostgreSql = request.getfixturevalue("server")
    return server.database()


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SQLite with tables, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "registry.db"
    Catalogue(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="module")
def template(server: PostgreSql) -> str:
    """The name of a database with tables, to be copied."""
    url = server.database()
    Catalogue(url).close()
    return url.partition("@/")[2].partition("?")[0]


@pytest.fixture(scope="module")
def used(server: PostgreSql) -> list[str]:
    """Registries of earlier tests: to empty one is faster than to make one."""
    return []


@pytest.fixture
def fresh_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a registry that the test may break."""
    if kind == "postgresql":
        server: PostgreSql = request.getfixturevalue("server")
        return server.database(request.getfixturevalue("template"))
    return f"sqlite:///{shutil.copy(request.getfixturevalue('migrated'), tempfile.mkdtemp(dir=tmp_path))}"


@pytest.fixture
def new_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Return the URLs of registries without images."""
    given: list[str] = []

    def new() -> str:
        if kind == "sqlite":
            return f"sqlite:///{shutil.copy(request.getfixturevalue('migrated'), tempfile.mkdtemp(dir=tmp_path))}"
        used: list[str] = request.getfixturevalue("used")
        server: PostgreSql = request.getfixturevalue("server")
        given.append(used.pop() if used else server.database(request.getfixturevalue("template")))
        with Catalogue(given[-1]) as catalogue:
            catalogue.database.write(empty)
        return given[-1]

    yield new
    if given:
        request.getfixturevalue("used").extend(given)


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def opened(url: str) -> Iterator[Callable[..., Catalogue]]:
    """Open the registry, several times concurrently if need be, as one node or another."""
    with ExitStack() as stack:
        yield lambda node=HERE: stack.enter_context(Catalogue(url, node=node))


@pytest.fixture
def catalogue(opened: Callable[..., Catalogue]) -> Catalogue:
    return opened()
