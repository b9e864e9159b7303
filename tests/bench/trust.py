"""What it costs to distrust a tenant: one image, restored by the same command for a tenant and for root, in turns.

The container carries the marks of CRI or does not. With them its image is looked up by name, its signature, namespace
and files are checked, CRIU's images are read in a process with limits, and credentials are compared before CRIU and
before the first instruction. Root's restore, which compares the digests alone, is the other side.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.checkpoint import PYTHON, read_proof
from tests.bench.figures import Pair, seconds
from tests.bench.memory_holder import command
from tests.system.ctr import KYBERNATE, Ctr, run

ROOT = Path("/var/lib/kybernate/checkpoints/bench")
SIZES = {"16MiB": 16, "256MiB": 256}
NAMES = tuple(f"trust.restore.{size}" for size in SIZES)
BAR = 1.02
TENANT = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-namespace": "bench",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.container-name": "holder",
}


def pairs(name: str) -> Iterator[Pair]:
    """Yield the comparison `name`."""
    size = name.rpartition(".")[2]
    with _image(size) as (image, proof):
        yield Pair(name, lambda: _restored(image, proof, TENANT), lambda: _restored(image, proof, {}), BAR)


@contextmanager
def _image(size: str) -> Iterator[tuple[Path, str]]:
    """Keep an image of a tenant's container, in memory, until the body ends."""
    ctr, image = Ctr(KYBERNATE, image=PYTHON), ROOT / size
    with ctr.running(*command(SIZES[size]), flags=_annotations(TENANT)) as id:
        proof = read_proof(ctr.pid(id))
        run(["kybernate", "checkpoint", id, str(image)], timeout=300)
    try:
        yield image, proof
    finally:
        shutil.rmtree(ROOT)


def _restored(image: Path, proof: str, marks: dict[str, str]) -> float:
    """Return the seconds of `ctr run -d` from the image, after a look at what came back."""
    ctr = Ctr(KYBERNATE, image=PYTHON)
    id = ctr.new_id("restored")
    flags = ["-d", *_annotations({**marks, "kybernate.io/restore-from": f"{image.name}" if marks else str(image)})]
    try:
        cost = seconds(lambda: run(ctr.run_argv(id, "/never/run", flags=flags), timeout=300))
        pid = ctr.pid(id)
        os.kill(pid, signal.SIGUSR1)
        assert read_proof(pid) == proof
        return cost
    finally:
        ctr.remove(id)


def _annotations(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in ("--annotation", f"{name}={value}")]
