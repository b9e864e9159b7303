"""Our ttrpc against bytes that we did not produce: recorded ones, and those of an encoder that knows only the rules.

The encoder is written from the protobuf and ttrpc specifications alone, so that a fault of the generated messages or
of the frames cannot hide by being made twice.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.messages import task_pb2
from kybernate_shim.ttrpc.codes import Code, RpcError
from kybernate_shim.ttrpc.connection import Answered, CallRefused, ClientConnection, Opened, ServerConnection, failure
from kybernate_shim.ttrpc.frames import FrameReader

CONNECT = (
    bytes.fromhex("00 00 00 4f  00 00 00 03  01 00")
    + b"\x0a\x17containerd.task.v2.Task"
    + b"\x12\x07Connect"
    + b"\x1a\x04\x0a\x02t1"
    + b"\x2a\x25\x0a\x1acontainerd-namespace-ttrpc\x12\x07default"
)
CONNECTED = bytes.fromhex("00 00 00 0a  00 00 00 03  02 00   12 08  08 9d f5 01 10 ba f5 01")
EMPTY = bytes.fromhex("00 00 00 00  00 00 00 2b  02 00")
NOT_FOUND = bytes.fromhex("00 00 00 26  00 00 00 03  02 00  0a 24 08 05 12 20") + b"container not created: not found"


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def number(field: int, value: int) -> bytes:
    """Encode an integer field, absent when 0; negative ones as their 64-bit complement."""
    return varint(field << 3) + varint(value % 2**64) if value else b""


def text(field: int, value: bytes) -> bytes:
    """Encode a string or bytes field, absent when empty."""
    return message(field, value) if value else b""


def message(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def frame(stream: int, kind: int, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + stream.to_bytes(4, "big") + bytes([kind, 0]) + data


def opened(server: ServerConnection, data: bytes) -> Opened:
    (item,) = FrameReader().feed(data)
    event = server.receive(item)
    assert isinstance(event, Opened)
    return event


def outcome(client: ClientConnection, data: bytes) -> bytes | RpcError:
    (item,) = FrameReader().feed(data)
    event = client.receive(item)
    assert isinstance(event, Answered)
    return event.outcome


def connecting_client(stream: int) -> tuple[ClientConnection, bytes]:
    client = ClientConnection(first_stream=stream)
    payload = task_pb2.ConnectRequest(id="t1").SerializeToString()
    metadata = {"containerd-namespace-ttrpc": "default"}
    return client, client.request("containerd.task.v2.Task", "Connect", payload, metadata=metadata)[1]


def test_recorded_request_is_understood_and_answered_with_the_recorded_bytes() -> None:
    server = ServerConnection()
    stream, request = opened(server, CONNECT)
    assert (stream, request.service, request.method) == (3, "containerd.task.v2.Task", "Connect")
    assert task_pb2.ConnectRequest.FromString(request.payload).id == "t1"
    assert [(pair.key, pair.value) for pair in request.metadata] == [("containerd-namespace-ttrpc", "default")]
    reply = task_pb2.ConnectResponse(shim_pid=31389, task_pid=31418)
    assert server.answer(3, reply.SerializeToString()) == CONNECTED


def test_request_is_sent_as_recorded() -> None:
    assert connecting_client(3)[1] == CONNECT


def test_recorded_answers_are_understood() -> None:
    payload = outcome(connecting_client(3)[0], CONNECTED)
    assert isinstance(payload, bytes)
    assert task_pb2.ConnectResponse.FromString(payload) == task_pb2.ConnectResponse(shim_pid=31389, task_pid=31418)
    assert outcome(connecting_client(43)[0], EMPTY) == b""
    error = outcome(connecting_client(3)[0], NOT_FOUND)
    assert isinstance(error, RpcError)
    assert (error.code, error.message) == (Code.NOT_FOUND, "container not created: not found")


def test_answers_are_sent_as_recorded() -> None:
    server = ServerConnection()
    opened(server, frame(43, 1, b""))
    assert server.answer(43, b"") == EMPTY
    assert failure(3, Code.NOT_FOUND, "container not created: not found") == NOT_FOUND


@given(
    st.text(max_size=300),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.tuples(st.text(), st.text()), max_size=4),
    st.integers(0, 2**31 - 1).map(lambda half: 2 * half + 1),
)
def test_requests_of_another_encoder_are_understood(
    service: str, method: str, payload: bytes, timeout_nano: int, metadata: list[tuple[str, str]], stream: int
) -> None:
    pairs = [text(1, key.encode()) + text(2, value.encode()) for key, value in metadata]
    data = text(1, service.encode()) + text(2, method.encode()) + text(3, payload) + number(4, timeout_nano)
    data += b"".join(message(5, pair) for pair in pairs)
    (item,) = FrameReader().feed(frame(stream, 1, data))
    event = ServerConnection().receive(item)
    if timeout_nano < 0:
        assert isinstance(event, CallRefused)
        assert event.code == Code.DEADLINE_EXCEEDED
        return
    assert isinstance(event, Opened)
    request = event.request
    assert (request.service, request.method, request.payload) == (service, method, payload)
    assert request.timeout_nano == timeout_nano
    assert [(pair.key, pair.value) for pair in request.metadata] == metadata
    unique = dict(metadata)
    if len(unique) == len(metadata):
        client = ClientConnection(first_stream=stream)
        sent = client.request(service, method, payload, metadata=unique, timeout_nano=timeout_nano)
        assert sent == (stream, frame(stream, 1, data))


@given(st.binary(max_size=1000), st.integers(0, 2**31 - 1).map(lambda half: 2 * half + 1))
def test_answers_have_the_bytes_of_another_encoder(payload: bytes, stream: int) -> None:
    server = ServerConnection()
    opened(server, frame(stream, 1, b""))
    assert server.answer(stream, payload) == frame(stream, 2, text(2, payload))


@given(st.sampled_from(list(Code)[1:]), st.text(max_size=300))
def test_failures_have_the_bytes_of_another_encoder(code: Code, words: str) -> None:
    expected = frame(5, 2, message(1, number(1, code) + text(2, words.encode())))
    assert failure(5, code, words) == expected
    client = ClientConnection(first_stream=5)
    client.request("s", "m", b"", metadata={})
    error = outcome(client, expected)
    assert isinstance(error, RpcError)
    assert (error.code, error.message) == (code, words)
