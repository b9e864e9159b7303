"""Dumps a container by a CRIU that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from kybernate_shim.checkpoint import script
from kybernate_shim.checkpoint.dump import dump
from kybernate_shim.checkpoint.dump_request import Dumped, DumpRequest
from kybernate_shim.checkpoint.image.manifest import NAME
from kybernate_shim.checkpoint.operation import Operation
from tests.unit.checkpoint.fake_target import LOG, FakeAccelerator, FakeTarget


def writes(target: FakeTarget, status: int, log: str = "") -> Any:
    """Return a CRIU that writes an image, and a log, and ends with a status."""

    def act(argv: Sequence[str]) -> int:
        (target.image / "inventory.img").write_bytes(b"inventory")
        (target.work / "dump.log").write_text(log)
        return status

    return act


def asks(target: FakeTarget, seen: list[bool]) -> Any:
    """Return a CRIU that writes an image and asks before it ends the container; `seen` gets whether that was whole.

    It ends it only if it may, and fails if not.
    """

    def question() -> bytes:
        environment = target.children.environment
        ask, answer = (Path(environment[name]) for name in (script.ASK, script.ANSWER))
        with ask.open("wb") as asking, answer.open("rb") as answering:
            asking.write(b"post-dump 7 8\n")
            asking.flush()
            return answering.readline()

    async def act(argv: Sequence[str]) -> int:
        writes(target, 0)(argv)
        answer = await asyncio.to_thread(question)
        seen.append((target.image / NAME).exists())
        return 0 if answer == script.PASS else 1

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
