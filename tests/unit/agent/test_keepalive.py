"""Clients that keep their connection alive by pings, without a call: the agent's server accepts them, in measure."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest

from kybernate.agent.serving import OPTIONS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7  # types of frames
ACK = 1
INTERVAL, STRIKES = "grpc.http2.min_ping_interval_without_data_ms", "grpc.http2.max_ping_strikes"
GO_LEAST_INTERVAL = 10_000  # ms: gRPC for Go raises what a client sets below it
DEADLINE = 10.0


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Source: RFC 9113, section 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, 0) + payload


async def answers(path: Path, options: Iterable[tuple[str, int]], pings: int) -> list[str]:
    """Ping a server so often without a call, and return what comes back: "pong", and "goodbye" where it ends."""
    server = grpc.aio.server(options=list(options))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    said = []
    try:
        async with asyncio.timeout(DEADLINE):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACK))
            for number in range(pings):
                writer.write(frame(PING, struct.pack(">Q", number)))
                said.append(await _answer(reader))
                if said[-1] == "goodbye":
                    break
            writer.close()
    finally:
        await server.stop(None)
    return said


async def _answer(reader: asyncio.StreamReader) -> str:
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] == PING and head[4] & ACK:
            return "pong"
        if head[3] == GOAWAY:
            assert b"too_many_pings" in payload
            return "goodbye"


@pytest.mark.parametrize("pings", [20])
def test_pings_without_a_call_are_answered(tmp_path: Path, pings: int) -> None:
    """At the interval that the server allows, which is none here, so that the test need not wait for it."""
    options = {**dict(OPTIONS), INTERVAL: 0}
    assert asyncio.run(answers(tmp_path / "s", options.items(), pings)) == ["pong"] * pings


def test_pings_that_come_too_often_end_the_connection(tmp_path: Path) -> None:
    said = asyncio.run(answers(tmp_path / "s", OPTIONS, 20))
    assert said[-1] == "goodbye"
    assert len(said) <= dict(OPTIONS)[STRIKES] + 3


def test_clients_of_gos_least_interval_are_within_the_allowed_one() -> None:
    assert 0 < dict(OPTIONS)[INTERVAL] < GO_LEAST_INTERVAL
