"""Dumps a container by a CRIU that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kybernate_shim.checkpoint.dump import dump
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.operation import Operation
from tests.unit.checkpoint.fake_target import LOG, FakeAccelerator, FakeTarget


def writes(target: FakeTarget, status: int, log: str = "") -> Any:
    """Return a CRIU that writes an image, and a log, and ends with a status."""

    def act(argv: Sequence[str]) -> int:
        (target.image / "inventory.img").write_bytes(b"inventory")
        (target.work / "dump.log").write_text(log)
        return status

    return act


async def never(argv: Sequence[str]) -> int:
    await asyncio.sleep(3600)
    return 0


async def checkpoint(target: FakeTarget, accelerator: FakeAccelerator | None = None, **request: Any) -> Dumped:
    wanted = DumpRequest(target.image, target.work, **request)
    return await dump(cast(Any, target), wanted, Operation("checkpoint"), LOG, accelerator)


def run(target: FakeTarget, accelerator: FakeAccelerator | None = None, **request: Any) -> Dumped:
    return asyncio.run(checkpoint(target, accelerator, **request))


AWAKE = ["thaw", "bytes back", "attach", "thaw"]
