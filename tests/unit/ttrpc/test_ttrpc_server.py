"""The server on a real socket: concurrency, deadlines, lost and slow peers, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from kybernate_shim.ttrpc import Call, Client, Code, Credentials, Method, RpcError, Server, same_user
from kybernate_shim.ttrpc.connection import MAX_CALLS
from kybernate_shim.ttrpc.frames import MAX_DATA
from tests.unit.ttrpc.served import SERVICE, Gate, RawClient, listen, method, run, say, serving, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


async def error_of(client: Client, name: str, text: str = "", **options: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await say(client, name, text, **options)
    return caught.value


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


@pytest.mark.parametrize("half", [True, False])
def test_lost_connection_cancels_only_what_waits(path: Path, half: bool) -> None:
    async def main() -> None:
        work, wait = Gate(), Gate()
        async with serving(path, {"Work": method(work), "Wait": method(wait, cancellable=True)}) as server:
            raw = await RawClient.connect(path)
            await raw.request(1, "Work")
            await raw.request(3, "Wait")
            await asyncio.gather(work.entered.wait(), wait.entered.wait())
            if half:
                raw.connection.shutdown(socket.SHUT_WR)
            else:
                raw.close()
            await wait.cancelled.wait()
            await until(lambda: server.connected == 0 and server.running == 1)
            work.go.set()
            await work.finished.wait()
            await until(lambda: server.running == 0)
            raw.close()

    run(main())


def test_connection_lost_with_its_request_leaves_no_task(path: Path) -> None:
    async def main() -> None:
        wait = Gate()
        async with serving(path, {"Wait": method(wait, cancellable=True)}) as server:
            for _ in range(50):
                raw = await RawClient.connect(path)
                await raw.request(1, "Wait")
                raw.close()
            client = await Client.connect(str(path))
            await say(client, "Echo")
            await until(lambda: server.connected == 1 and server.running == 0)
            await client.close()

    run(main())


def test_peer_that_does_not_read_is_dropped(path: Path) -> None:
    async def main() -> None:
        wait = Gate()
        async with serving(path, {"Wait": method(wait, cancellable=True)}) as server:
            other = await Client.connect(str(path))
            raw = await RawClient.connect(path)
            await raw.request(1, "Wait")
            for stream in range(3, 3 + 2 * 24, 2):
                try:
                    await raw.request(stream, "Echo", "x" * (1 << 20))
                except ConnectionError:
                    break
            await wait.cancelled.wait()
            await until(lambda: server.connected == 1 and server.running == 0)
            assert await say(other, "Echo", "others go on") == "others go on"
            await other.close()
            raw.close()

    run(main())


def test_calls_of_one_connection_are_bounded(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}) as server:
            client = await Client.connect(str(path))
            calls = [asyncio.create_task(say(client, "Gate")) for _ in range(MAX_CALLS)]
            await until(lambda: server.running == MAX_CALLS)
            assert (await error_of(client, "Echo")).code == Code.RESOURCE_EXHAUSTED
            other = await Client.connect(str(path))
            assert await say(other, "Echo", "not mine") == "not mine"
            gate.go.set()
            await asyncio.gather(*calls)
            assert await say(client, "Echo", "room again") == "room again"
            await asyncio.gather(client.close(), other.close())

    run(main())


def test_authorize_sees_the_peer_and_can_refuse_it(path: Path) -> None:
    seen: list[Credentials] = []

    def refuse(peer: Credentials) -> bool:
        seen.append(peer)
        return False

    async def main() -> None:
        async with serving(path, {}, authorize=refuse) as server:
            raw = await RawClient.connect(path)
            assert await raw.rest() == b""
            assert server.connected == 0
            raw.close()

    run(main())
    assert seen == [(os.getpid(), os.geteuid(), os.getegid())]


def test_authorize_that_raises_lets_nobody_in(path: Path) -> None:
    def fail(peer: Credentials) -> bool:
        raise LookupError("no such user")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with serving(path, {}, authorize=fail):
            raw = await RawClient.connect(path)
            assert await raw.rest() == b""
            raw.close()

    run(main())


def test_only_our_own_user_and_group_are_let_in() -> None:
    uid, gid = os.geteuid(), os.getegid()
    assert same_user(Credentials(1, uid, gid))
    assert not same_user(Credentials(1, uid + 1, gid))
    assert not same_user(Credentials(1, uid, gid + 1))


def test_clients_that_came_before_the_start_are_served(path: Path) -> None:
    async def main() -> None:
        listener = listen(path, backlog=2)
        early = [await RawClient.connect(path) for _ in range(3)]  # one more than the backlog: it is full
        for client in early:
            await client.request(1, "Echo", "early")
        server = Server({SERVICE: {"Echo": Method(StringValue, lambda request, call: asyncio.sleep(0, request))}})
        await server.start(listener)
        for client in early:
            assert (await client.response())[0] == 1
            client.close()
        await server.close()

    run(main())


def test_stop_accepting_keeps_connections_and_the_file(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}) as server:
            client = await Client.connect(str(path))
            assert await say(client, "Echo") == ""
            await server.stop_accepting()
            await server.stop_accepting()
            with pytest.raises(ConnectionRefusedError):
                await Client.connect(str(path))
            assert await say(client, "Echo", "goes on") == "goes on"
            await client.close()
        assert path.is_socket()

    run(main())


def test_close_answers_what_is_in_flight_and_refuses_the_rest(path: Path) -> None:
    async def main() -> None:
        work, wait = Gate(), Gate()
        async with serving(path, {"Work": method(work), "Wait": method(wait, cancellable=True)}) as server:
            client = await Client.connect(str(path))
            working = asyncio.create_task(say(client, "Work", "done"))
            waiting = asyncio.create_task(error_of(client, "Wait"))
            await asyncio.gather(work.entered.wait(), wait.entered.wait())
            closing = asyncio.create_task(server.close())
            assert (await waiting).code == Code.CANCELED
            assert (await error_of(client, "Echo")).code == Code.UNAVAILABLE
            work.go.set()
            assert await working == "done"
            await closing
            assert (server.connected, server.running) == (0, 0)
            await until(lambda: client.closed)

    run(main())


def test_close_gives_up_on_handlers_and_readers_after_its_grace(path: Path) -> None:
    async def main() -> None:
        work = Gate()
        async with serving(path, {"Work": method(work)}) as server:
            raw = await RawClient.connect(path)
            for stream in (1, 3, 5):
                await raw.request(stream, "Echo", "x" * (3 << 20))  # answers that nobody reads
            await raw.request(7, "Work")
            await work.entered.wait()
            await server.close(grace=0.01)
            await work.cancelled.wait()
            await until(lambda: server.connected == 0 and server.running == 0)
            raw.close()

    run(main())


def test_handler_can_close_its_server(path: Path) -> None:
    async def main() -> None:
        server: Server

        async def end(request: StringValue, call: Call) -> Message:
            await server.close()
            return request

        async with serving(path, {"End": method(end)}) as server:
            client = await Client.connect(str(path))
            with pytest.raises(ConnectionError):
                await say(client, "End")
            await until(lambda: server.running == 0)

    run(main())
