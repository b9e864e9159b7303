"""An operation in a process of its own, as in a daemon, for a fault to kill it: `python -m tests.faults.daemon`.

Its arguments are the operation's name, the bench's directory, and NAME=PID for each program.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from kybernate_shim.arena.memory import Memory
from kybernate_shim.gpu.helper_client import CudaHelper
from tests.fakes.cuda import Gpus
from tests.faults.bench import ARENA_BYTES, Bench
from tests.faults.operations import LIMITS, OPERATIONS


def bench_at(root: Path, pids: dict[str, int]) -> Bench:
    """Return what an operation needs of a bench that another process has started."""
    view = SimpleNamespace(
        root=root,
        images=root / "images",
        gpus=Gpus(root / "machine"),
        memory=Memory(ARENA_BYTES, root / "arena"),
        tenants={name: SimpleNamespace(pid=pid) for name, pid in pids.items()},
        helper=CudaHelper(root / "run" / "cuda.sock", start=False),
    )
    return cast(Bench, view)


def main(argv: Sequence[str]) -> None:
    name, root, *programs = argv
    pids = {name: int(pid) for name, _, pid in (one.partition("=") for one in programs)}
    operation = next(one for one in OPERATIONS if one.name == name)

    async def act() -> None:  # in the loop, to which the helper's client belongs
        await operation.act(bench_at(Path(root), pids), LIMITS)

    asyncio.run(act())


if __name__ == "__main__":
    main(sys.argv[1:])
