"""The server on a real socket: what handlers are given and what callers are answered, side by side."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from kybernate_shim.ttrpc import Call, Client, Code, RpcError
from kybernate_shim.ttrpc.frames import MAX_DATA
from tests.unit.ttrpc.served import SERVICE, Gate, RawClient, error_of, method, run, say, serving


def test_handler_learns_what_the_caller_sent(path: Path) -> None:
    calls: list[Call] = []

    async def note(request: StringValue, call: Call) -> Message:
        calls.append(call)
        return request

    async def main() -> None:
        async with serving(path, {"Note": method(note)}):
            client = await Client.connect(str(path), metadata={"a": "1", "b": "1"}, timeout=5)
            now = asyncio.get_running_loop().time()
            assert await say(client, "Note", "text", metadata={"b": "2"}, timeout=100) == "text"
            assert await say(client, "Note") == ""
            assert calls[0].deadline is not None
            assert 99 < calls[0].deadline - now < 110
            await client.close()

    run(main())
    assert (calls[0].service, calls[0].method, calls[0].metadata) == (SERVICE, "Note", {"a": "1", "b": "2"})
    assert calls[0].peer == (os.getpid(), os.geteuid(), os.getegid())
    assert calls[1].deadline is None


def test_first_of_doubled_metadata_counts(path: Path) -> None:
    calls: list[Call] = []

    async def note(request: StringValue, call: Call) -> Message:
        calls.append(call)
        return request

    async def main() -> None:
        async with serving(path, {"Note": method(note)}):
            raw = await RawClient.connect(path)
            await raw.request(1, "Note", metadata=[{"key": "a", "value": "1"}, {"key": "a", "value": "2"}])
            await raw.response()
            raw.close()

    run(main())
    assert calls[0].metadata == {"a": "1"}


def test_answers_overtake_each_other(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}):
            client = await Client.connect(str(path))
            slow = asyncio.create_task(say(client, "Gate", "slow"))
            await gate.entered.wait()
            assert await asyncio.gather(*(say(client, "Echo", str(n)) for n in range(200))) == list(
                map(str, range(200))
            )
            assert not slow.done()
            gate.go.set()
            assert await slow == "slow"
            await client.close()

    run(main())


def test_large_answers_do_not_interleave(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}):
            client = await Client.connect(str(path))
            texts = [letter * (1 << 20) for letter in "abcdefgh"]
            assert await asyncio.gather(*(say(client, "Echo", text) for text in texts)) == texts
            await client.close()

    run(main())


def test_errors_of_handlers_are_answered(path: Path) -> None:
    noticed: list[tuple[str, Exception]] = []
    bug = ZeroDivisionError("a bug")

    async def refuse(request: StringValue, call: Call) -> Message:
        raise RpcError(Code.NOT_FOUND, "container t1: not found")

    async def fail(request: StringValue, call: Call) -> Message:
        raise bug

    async def fail_silently(request: StringValue, call: Call) -> Message:
        raise KeyError

    async def cancel(request: StringValue, call: Call) -> Message:
        raise asyncio.CancelledError

    async def forget(request: StringValue, call: Call) -> Message:
        return None  # type: ignore[return-value]

    def grow(request: StringValue, call: Call) -> Any:
        return asyncio.sleep(0, StringValue(value="x" * MAX_DATA))

    async def main() -> None:
        handlers = [refuse, fail, fail_silently, cancel, forget, grow]
        methods = {handler.__name__: method(handler) for handler in handlers}
        async with serving(path, methods, on_error=lambda call, error: noticed.append((call.method, error))):
            client = await Client.connect(str(path))
            answers = {name: await error_of(client, name) for name in methods}
            assert await say(client, "Echo", "still there") == "still there"
            await client.close()
        assert {name: answer.code for name, answer in answers.items()} == {
            "refuse": Code.NOT_FOUND,
            "fail": Code.UNKNOWN,
            "fail_silently": Code.UNKNOWN,
            "cancel": Code.CANCELED,
            "forget": Code.UNKNOWN,
            "grow": Code.RESOURCE_EXHAUSTED,
        }
        assert answers["refuse"].message == "container t1: not found"
        assert answers["fail"].message == "a bug"
        assert answers["fail_silently"].message == "KeyError"

    run(main())
    assert [name for name, _ in noticed] == ["fail", "fail_silently", "forget"]
    assert noticed[0][1] is bug


def test_unknown_names_and_payloads_are_answered(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}):
            client = await Client.connect(str(path))
            assert (await error_of(client, "Missing")).code == Code.UNIMPLEMENTED
            with pytest.raises(RpcError, match="service no-Service: not implemented") as caught:
                await client.call("no-Service", "Echo", StringValue(), StringValue)
            assert caught.value.code == Code.UNIMPLEMENTED
            newer = StringValue.FromString(b"\xfa\x01\x01x")  # a field that is unknown here, which is no error
            assert (await client.call(SERVICE, "Echo", newer, StringValue)).value == ""
            await client.close()

            other = await RawClient.connect(path)
            await other.request(1, "Echo", payload=b"\xff")
            stream, response = await other.response()
            assert (stream, response.status.code) == (1, Code.INTERNAL)
            other.close()

    run(main())
