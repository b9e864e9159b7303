"""The server on a real socket: deadlines of calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kybernate_shim.ttrpc import Code
from tests.unit.ttrpc.served import Gate, RawClient, method, run, serving, until


def test_passed_deadline_is_answered_and_the_handler_ends_its_work(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}) as server:
            raw = await RawClient.connect(path)
            await raw.request(1, "Gate", timeout_nano=1)
            stream, response = await raw.response()
            assert (stream, response.status.code) == (1, Code.DEADLINE_EXCEEDED)
            assert server.running == 1
            gate.go.set()
            await gate.finished.wait()
            await raw.request(3, "Echo", "next")  # the only answer: that of stream 1 came before
            assert (await raw.response())[0] == 3
            assert not gate.cancelled.is_set()
            raw.close()

    run(main())


def test_deadline_ends_a_handler_that_only_waits(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate, cancellable=True)}) as server:
            raw = await RawClient.connect(path)
            await raw.request(1, "Gate", timeout_nano=1)
            assert (await raw.response())[1].status.code == Code.DEADLINE_EXCEEDED
            await until(lambda: server.running == 0)
            raw.close()

    run(main())


def test_deadline_of_an_answered_call_passes_quietly(path: Path) -> None:
    problems: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        async with serving(path, {}):
            raw = await RawClient.connect(path)
            await raw.request(1, "Echo", timeout_nano=20_000_000)
            await raw.response()
            deadline = loop.time() + 0.02
            await until(lambda: loop.time() > deadline)
            await raw.request(3, "Echo")
            assert (await raw.response())[0] == 3
            raw.close()

    run(main())
    assert problems == []


def test_deadline_centuries_away_is_none(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}):
            raw = await RawClient.connect(path)
            await raw.request(1, "Echo", timeout_nano=2**63 - 1)
            assert not (await raw.response())[1].HasField("status")
            raw.close()

    run(main())
