"""The client: what its caller sees when a server is slow, silent, broken or gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kybernate_shim.ttrpc import Client, Code, ProtocolViolated, RpcError, Server
from kybernate_shim.ttrpc.connection import LAST_STREAM, ClientConnection
from kybernate_shim.ttrpc.frames import HEADER, MAX_DATA, Frame, Kind
from tests.unit.ttrpc.served import SERVICE, Gate, listen, method, run, say, serving, until

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(path: Path, script: Script) -> AsyncIterator[Client]:
    """Connect a client to a server that does what `script` says, and closes the connection then."""

    async def follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(follow, path)
    client = await Client.connect(str(path))
    try:
        yield client
    finally:
        await client.close()
        server.close()


def answering(*answers: bytes) -> Script:
    """Read one request, then send `answers` and the end of the connection."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = await reader.readexactly(HEADER.size)
        await reader.readexactly(HEADER.unpack(header)[0])
        writer.write(b"".join(answers))

    return script


def response(stream: int, data: bytes) -> bytes:
    return Frame(stream, Kind.RESPONSE, 0, data).encode()


def test_connect_fails_without_a_server(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(Client.connect(str(path)))


def test_connect_waits_for_a_busy_listener(path: Path) -> None:
    async def main() -> None:
        listener = listen(path, backlog=0)
        with contextlib.ExitStack() as others:
            blocked = False
            while not blocked:
                other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                other.setblocking(False)
                try:
                    other.connect(str(path))
                except BlockingIOError:
                    blocked = True
            with pytest.raises(TimeoutError):
                await Client.connect(str(path), timeout=0)
            connecting = asyncio.create_task(Client.connect(str(path)))
            await asyncio.sleep(0)  # its first attempt fails
            assert not connecting.done()
            server = Server({SERVICE: {}})
            await server.start(listener)
            client = await connecting
            with pytest.raises(RpcError, match="not implemented"):
                await say(client, "Echo")
            await client.close()
            await server.close()

    run(main())


def test_silent_server_times_out_and_the_connection_stays(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}):
            client = await Client.connect(str(path))
            with pytest.raises(TimeoutError):
                await say(client, "Gate", timeout=0)
            gate.go.set()  # no call waits for its late answer
            await gate.finished.wait()
            assert await say(client, "Echo", "next") == "next"
            await client.close()

    run(main())


def test_cancelled_call_is_forgotten(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}):
            client = await Client.connect(str(path))
            call = asyncio.create_task(say(client, "Gate"))
            await gate.entered.wait()
            call.cancel()
            gate.go.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await say(client, "Echo", "next") == "next"
            await client.close()

    run(main())


def test_answer_that_comes_with_the_cancellation_harms_nobody(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}):
            client = await Client.connect(str(path))
            call = asyncio.create_task(say(client, "Gate"))
            await gate.entered.wait()
            call.cancel()
            client._link.data_received(response(1, b""))  # in the same turn of the loop, before the caller's
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await say(client, "Echo", "next") == "next"
            await client.close()

    run(main())


def test_connection_without_stream_ids_left_is_closed(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}):
            client = await Client.connect(str(path))
            client._link._core = ClientConnection(first_stream=LAST_STREAM)  # after two thousand million calls
            assert await say(client, "Echo", "last") == "last"
            with pytest.raises(ConnectionError):
                await say(client, "Echo")
            assert client.closed

    run(main())


def test_end_of_the_connection_fails_every_call(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}) as server:
            client = await Client.connect(str(path))
            calls = [asyncio.create_task(say(client, "Gate")) for _ in range(3)]
            await until(lambda: server.running == 3)
            assert not client.closed
            await server.close(grace=0)
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [ConnectionError] * 3
            assert client.closed
            with pytest.raises(ConnectionError):
                await say(client, "Echo")

    run(main())


def test_close_fails_calls_in_flight(path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with serving(path, {"Gate": method(gate)}):
            client = await Client.connect(str(path))
            call = asyncio.create_task(say(client, "Gate"))
            await gate.entered.wait()
            await client.close()
            await client.close()
            assert client.closed
            with pytest.raises(ConnectionError):
                await call

    run(main())


def test_server_that_does_not_read_is_given_up(path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with scripted(path, silent) as client:
            calls = [say(client, "Echo", "x" * (3 << 20)) for _ in range(8)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [ConnectionError] * 8
            assert client.closed

    run(main())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (response(1, b"\xff\xff"), Code.INTERNAL),
        (response(1, b"\x12\x01\xff"), Code.INTERNAL),  # an answer, but not of the expected message
        (response(1, b"\x0a\x04\x08\x05\x12\x00"), Code.NOT_FOUND),
        (response(1, b"\x0a\x02\x08\x63"), Code.UNKNOWN),
        (HEADER.pack(MAX_DATA + 1, 1, Kind.RESPONSE, 0), Code.RESOURCE_EXHAUSTED),
    ],
)
def test_bad_answers_are_errors_of_their_call(path: Path, answer: bytes, code: Code) -> None:
    async def main() -> None:
        async with scripted(path, answering(answer)) as client:
            with pytest.raises(RpcError) as caught:
                await say(client, "Echo")
            assert caught.value.code == code

    run(main())


def test_frame_of_an_unknown_kind_is_ignored(path: Path) -> None:
    answer = response(1, b"\x12\x04\x0a\x02ok")

    async def main() -> None:
        async with scripted(path, answering(Frame(1, 99, 0, b"x").encode(), answer)) as client:
            assert await say(client, "Echo") == "ok"

    run(main())


def test_violation_of_the_protocol_fails_every_call_and_shows_what_came(path: Path) -> None:
    async def main() -> None:
        async with scripted(path, answering(response(9, b"x"), response(1, b""))) as client:
            results = await asyncio.gather(*(say(client, "Echo") for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [ProtocolViolated] * 3
            assert len({id(result) for result in results}) == 3
            text = f"{path}: the stream was never opened: response on stream 9, flags 0x00, 1 bytes (78)"
            assert {str(result) for result in results} == {text}
            assert client.closed
            with pytest.raises(ConnectionError):
                await say(client, "Echo")

    run(main())


def test_text_of_another_protocol_is_a_violation(path: Path) -> None:
    async def main() -> None:
        async with scripted(path, answering(b"HTTP/1.1 400 Bad Request\r\n")) as client:
            with pytest.raises(ProtocolViolated, match="too large: frame of kind 32 on stream 791752241"):
                await say(client, "Echo")

    run(main())


def test_end_inside_a_frame_says_so(path: Path) -> None:
    async def main() -> None:
        async with scripted(path, answering(response(1, b"\x12\x04\x0a\x02ok")[:-3])) as client:
            with pytest.raises(ConnectionError, match="before the answer, 13 bytes into a frame"):
                await say(client, "Echo")

    run(main())


def test_request_too_large_fails_alone(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}):
            client = await Client.connect(str(path))
            with pytest.raises(RpcError) as caught:
                await say(client, "Echo", "x" * MAX_DATA)
            assert caught.value.code == Code.RESOURCE_EXHAUSTED
            assert await say(client, "Echo", "ok") == "ok"
            await client.close()

    run(main())
