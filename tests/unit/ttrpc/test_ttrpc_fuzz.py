"""Garbage: it may be answered with an error or cost its sender the connection, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.ttrpc import Call, Client, Code, ProtocolViolated, RpcError
from kybernate_shim.ttrpc import ttrpc_pb2 as wire
from kybernate_shim.ttrpc.connection import CallRefused, ClientConnection, Opened, ServerConnection
from kybernate_shim.ttrpc.frames import HEADER, MAX_DATA, Frame, FrameReader, Kind
from tests.unit.ttrpc.served import SERVICE, Gate, RawClient, method, run, say, serving, until

ROUNDS = 400
SMALL_CALLS = 8


def valid_traffic(first_stream: int = 1) -> bytes:
    """Return what a client with five calls says."""
    client = ClientConnection(first_stream=first_stream)
    names = ["Echo", "Fail", "Wait", "Missing", "Echo"]
    payload = StringValue(value="text").SerializeToString()
    return b"".join(client.request(SERVICE, name, payload, metadata={"ns": "default"})[1] for name in names)


@st.composite
def mutated_traffic(draw: st.DrawFn) -> bytes:
    """Valid traffic with bytes changed, and pieces cut out, doubled or put in."""
    data = bytearray(valid_traffic())
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data)))
        end = draw(st.integers(place, min(len(data), place + 20)))
        data[place:end] = draw(st.one_of(st.binary(max_size=20), st.just(bytes(data[place:end]) * 2)))
    return bytes(data)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Well-framed garbage, huge lengths included."""
    data = draw(st.binary(max_size=40))
    length = draw(st.sampled_from([len(data)] * 4 + [MAX_DATA, MAX_DATA + 1, 2**31, 2**32 - 1]))
    return HEADER.pack(length, draw(st.integers(0, 9)), draw(st.integers(0, 4)), draw(st.integers(0, 8))) + data


GARBAGE = st.lists(st.one_of(st.binary(max_size=200), mutated_traffic(), frames()), max_size=12)


@given(GARBAGE)
def test_server_core_answers_garbage_and_stays_small(pieces: list[bytes]) -> None:
    reader, server = FrameReader(), ServerConnection(max_calls=SMALL_CALLS)
    for piece in pieces:
        for item in reader.feed(piece):
            event = server.receive(item)
            assert event is None or event.stream == item.stream
            if isinstance(event, CallRefused):
                (frame,) = FrameReader().feed(event.frame)
                assert isinstance(frame, Frame)
                assert wire.Response.FromString(frame.data).status.code == event.code != Code.OK
        assert reader.buffered <= HEADER.size + sum(map(len, pieces))
        assert server.active <= SMALL_CALLS


@given(GARBAGE)
def test_client_core_takes_garbage_for_a_violation_or_ends_its_call(pieces: list[bytes]) -> None:
    reader, client = FrameReader(), ClientConnection()
    waiting = {client.request(SERVICE, "Echo", b"", metadata={})[0] for _ in range(3)}
    for piece in pieces:
        for item in reader.feed(piece):
            with contextlib.suppress(ProtocolViolated):
                if answered := client.receive(item):
                    waiting.remove(answered.stream)  # each of them once
                    assert isinstance(answered.outcome, bytes | RpcError)


def test_flood_of_broken_frames_takes_no_memory() -> None:
    reader, server = FrameReader(), ServerConnection()
    flood = b"".join(Frame(n, n % 5, n % 8, b"\xff" * (n % 50)).encode() for n in range(2000))
    flood += HEADER.pack(2**30, 2**31 + 1, Kind.REQUEST, 0)
    with peak_below(4 << 20):
        for _ in range(100):
            for item in reader.feed(flood):
                assert not isinstance(server.receive(item), Opened)
            assert reader.buffered == server.active == 0


@contextlib.contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """Fail when the block has more than `limit` bytes allocated beyond what it found."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated at the peak"


def garbage(source: random.Random) -> bytes:
    """Return one connection's worth of noise, framed noise, broken traffic, or a huge announcement."""
    noise = source.randbytes(source.randrange(2000))
    kind = source.randrange(4)
    if kind == 0:
        return noise
    if kind == 1:
        return Frame(source.randrange(1, 99), source.randrange(4), source.randrange(8), noise).encode()
    if kind == 2:
        return HEADER.pack(source.randrange(MAX_DATA - 9, 2**32), 1, Kind.REQUEST, 0) + noise
    data = bytearray(valid_traffic())
    for _ in range(source.randrange(1, 8)):
        data[source.randrange(len(data))] = source.randrange(256)
    return bytes(data)


async def fail(request: StringValue, call: Call) -> Message:
    raise ValueError(request.value)


def test_server_outlives_garbage_and_forgets_it(path: Path) -> None:
    """Connections of garbage, some ended by us and some left for the server to hold, next to one that works."""

    async def attack(source: random.Random) -> None:
        raw = await RawClient.connect(path)
        with contextlib.suppress(ConnectionError):
            await raw.send(garbage(source))
            if source.random() < 0.5:
                raw.connection.shutdown(1)
                await raw.rest()
        raw.close()

    async def main() -> None:
        source = random.Random(20)
        methods = {"Fail": method(fail), "Wait": method(Gate(), cancellable=True)}
        async with serving(path, methods) as server:
            client = await Client.connect(str(path))
            await attack(source)
            with peak_below(8 << 20):
                for number in range(ROUNDS):
                    await attack(source)
                    if number % 20 == 0:
                        assert await say(client, "Echo", str(number)) == str(number)
                await until(lambda: server.connected == 1 and server.running == 0)
            await client.close()

    run(main())


def test_many_unfinished_frames_are_held_until_their_peers_go(path: Path) -> None:
    async def main() -> None:
        async with serving(path, {}) as server:
            with peak_below(8 << 20):
                others = [await RawClient.connect(path) for _ in range(50)]
                for other in others:
                    await other.send(HEADER.pack(MAX_DATA, 1, Kind.REQUEST, 0) + bytes(1000))
                client = await Client.connect(str(path))
                assert await say(client, "Echo", "works") == "works"
                assert server.connected == 51
                for other in others:
                    other.close()
                await until(lambda: server.connected == 1)
                await client.close()

    run(main())


def test_client_outlives_a_server_that_talks_garbage(path: Path) -> None:
    source = random.Random(20)

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        data = garbage(source)
        if source.random() < 0.5:
            data = Frame(1, Kind.RESPONSE, 0, data[:100]).encode()
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            writer.close()
            await writer.wait_closed()

    async def main() -> None:
        server = await asyncio.start_unix_server(babble, path)
        ends = set()
        for _ in range(ROUNDS // 2):
            client = await Client.connect(str(path))
            try:
                await say(client, "Echo")
            except (RpcError, ConnectionError) as error:
                ends.add(type(error))
            await client.close()
        server.close()
        assert ends == {RpcError, ConnectionError, ProtocolViolated}

    run(main())
