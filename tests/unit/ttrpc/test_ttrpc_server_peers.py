"""The server on a real socket: who is let in, and peers that are lost, slow or ask too much."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from kybernate_shim.ttrpc import Client, Code, Credentials, same_user
from kybernate_shim.ttrpc.connection import MAX_CALLS
from tests.unit.ttrpc.served import Gate, RawClient, error_of, method, run, say, serving, until


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
