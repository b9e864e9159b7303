"""Fixtures of the system tests: they run inside the lab, as root, against its containerd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.ctr import KYBERNATE, STOCK, Ctr, Events
from tests.system.leftovers import Snapshot, assert_nothing_left
from tests.system.tenants import pods_place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and not Path("/run/lab").exists():
        raise pytest.UsageError("system tests run inside the lab: tests/lab/run LANE -- …")


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    """Every test must leave the node as it found it."""
    before = Snapshot.take()
    yield
    assert_nothing_left(before)


@pytest.fixture(params=[KYBERNATE, STOCK], ids=["kybernate", "stock"])
def ctr(request: pytest.FixtureRequest) -> Ctr:
    """`ctr` under our shim and, as the oracle for the same test, under containerd's own."""
    return Ctr(runtime=request.param)


@pytest.fixture
def ours() -> Ctr:
    return Ctr()


@pytest.fixture
def shim_config() -> Iterator[Path]:
    """The node's configuration file, which is absent before and afterwards."""
    path = Path("/etc/kybernate/shim.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def pods_image() -> Iterator[Path]:
    """Where an image of a pod in the namespace "default" lies; pods name it by its last component."""
    with pods_place() as place:
        yield place


@pytest.fixture
def events() -> Iterator[Events]:
    with Events() as stream:
        yield stream
