"""Fixtures of the attacks: those of the system tests, and a tenant who may do what a pod's author may, nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.hostile.tenant import SECRET, Tenant
from tests.system.conftest import (  # noqa: F401  # pytest finds fixtures by their names here
    _nothing_left_over,
    ctr,
    events,
    ours,
    pods_image,
    pytest_collection_modifyitems,
    shim_config,
)
from tests.system.cri import Cri


@pytest.fixture
def cri() -> Iterator[Cri]:
    with Cri() as client:
        yield client


@pytest.fixture
def tenant(cri: Cri) -> Iterator[Tenant]:
    with Tenant.in_namespace(cri, "tenant-a") as one:
        yield one


@pytest.fixture
def other_tenant(cri: Cri) -> Iterator[Tenant]:
    with Tenant.in_namespace(cri, "tenant-b") as one:
        yield one


@pytest.fixture
def no_helper() -> Iterator[None]:
    """End the CUDA helper that a suspend or a report of the node starts, and remove its files."""
    yield
    for process in psutil.process_iter(["cmdline"]):
        if "kybernate_shim.cuda_helper.helper" in (process.info["cmdline"] or []):  # nothing of a zombie's
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                process.terminate()
                process.wait(10)
    for path in Path("/run/kybernate").glob("cuda.*"):
        path.unlink()


@pytest.fixture
def node_key(tmp_path: Path) -> Path:
    """A directory of the node's with a file that root alone can read."""
    directory = tmp_path / "keys"
    directory.mkdir(mode=0o700)
    (directory / "key").write_bytes(SECRET)
    return directory
