"""Fixtures of the system tests: they run inside the lab, as root, against its containerd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.node import Containerd
from tests.system import identity
from tests.system.ctr import KYBERNATE, STOCK, Ctr, Events, containerd_version
from tests.system.leftovers import Snapshot, assert_nothing_left
from tests.system.tenants import pods_place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if items and not Path("/run/lab").exists():
        raise pytest.UsageError("system tests run inside the lab: tests/lab/run LANE -- …")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    identity.set_for(item)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    """Every test must leave the node as it found it."""
    before = Snapshot.take()
    yield
    assert_nothing_left(before)


# containerd's own shim loses the output of one exec in some thousands, and now and then an event: what it answers is
# the oracle for the expectation, which one passage of three shows. A test of our shim is never repeated.
_ORACLE = pytest.param(STOCK, id="stock", marks=pytest.mark.flaky(reruns=2))


@pytest.fixture(params=[pytest.param(KYBERNATE, id="kybernate"), _ORACLE])
def ctr(request: pytest.FixtureRequest) -> Ctr:
    """`ctr` under our shim and, as the oracle for the same test, under containerd's own."""
    return Ctr(runtime=request.param)


@pytest.fixture
def ours() -> Ctr:
    return Ctr()


@pytest.fixture
def cri_restore() -> None:
    """CRI restores a container whose image is a checkpoint; the test is left out where it does not."""
    version = containerd_version()
    if not (2, 1) <= version < (2, 4):
        pytest.skip(f"CRI of containerd {version[0]}.{version[1]} does not restore: 2.1 to 2.3 do")


@pytest.fixture
def containerd() -> Iterator[Containerd]:
    """containerd's process, which runs again in the end, lest one failed test fails all that follow."""
    daemon = Containerd()
    yield daemon
    if not daemon.alive():
        daemon.start()
    daemon.wait_ready()


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
