"""What tests of forked children share: fixtures that wait for none of them, attempts at a checkpoint, a look at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.ctr import Ctr, finished

EVADES = ["python3", f"{gpu.INSIDE}/evades.py"]


@pytest.fixture
def ctr(node: Gpus) -> Iterator[Ctr]:
    yield Ctr()
    gpu.heal(node)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


def try_to_checkpoint(id: str, image: Path) -> str:
    """Checkpoint a container that continues; return what was said if that was refused, "" if there is an image."""
    done = finished(["kybernate", "checkpoint", id, str(image)], timeout=120)
    if done.returncode == 0:
        return ""
    said = done.stderr.decode()
    assert any(words in said for words in ("continues as before", "keeps running", "Nothing was changed"))
    return said


def assert_let_go(container: gpu.Computing, *, stopped: int = 0) -> None:
    """No process of the container is traced by one outside, and so many are stopped."""
    pids, states = container.pids(), []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            states.append(status["State"][0])
            assert int(status["TracerPid"]) in (0, *pids), status
    assert (states.count("T"), states.count("t")) == (stopped, 0), states
