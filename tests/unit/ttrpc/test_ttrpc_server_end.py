"""The server on a real socket: its beginning and its orderly end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from kybernate_shim.ttrpc import Call, Client, Code, Method, Server
from tests.unit.ttrpc.served import SERVICE, Gate, RawClient, error_of, listen, method, run, say, serving, until


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
                await raw.request(stream, "Echo", "x" * (3 << 20))  # answers that no process reads
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
