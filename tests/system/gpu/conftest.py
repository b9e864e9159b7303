"""A node with two pretended GPUs, its CUDA helper, and what tests with containers on them share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.gpu.arriving import name, store  # noqa: F401  # fixtures
from tests.system.gpu.devices import devices  # noqa: F401  # a fixture


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[Gpus]:
    """A node with two GPUs, whose helper runs already: a test starts and ends with the same processes."""
    gpus = gpu.install_driver()
    kybernate("cuda", "state", "--pid", str(os.getpid()))
    yield gpus
    gpu.forget_helper()
    gpu.remove_driver()


@pytest.fixture
def gpus(node: Gpus) -> Iterator[Gpus]:
    yield node
    gpu.heal(node)
    eventually(lambda: node.used() == [0, 0])


@pytest.fixture
def ctr(gpus: Gpus) -> Ctr:
    return Ctr()


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Deadlines that a test can wait for."""
    config = Path("/etc/kybernate/shim.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("[gpu]\nlock = 1\ncheckpoint = 1\nrestore = 1\nunlock = 1\n")
    yield
    config.unlink()


@pytest.fixture
def cri(gpus: Gpus) -> Iterator[Cri]:
    cri = Cri()
    yield cri
    cri.close()


@pytest.fixture
def settings() -> Iterator[Callable[[str], None]]:
    """Write the `[gpu]` table of the node's settings."""
    config = Path("/etc/kybernate/shim.toml")
    config.parent.mkdir(exist_ok=True)
    yield lambda text: (config.write_text(f"[gpu]\n{text}\n"), None)[1]
    config.unlink(missing_ok=True)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory."""
    directory = tmp_path / "memory"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)
