"""The two state machines: what is refused, what is answered once, and how they do when driven against each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kybernate_shim.ttrpc import ttrpc_pb2 as wire
from kybernate_shim.ttrpc.codes import Code, RpcError
from kybernate_shim.ttrpc.connection import (
    LAST_STREAM,
    MAX_MESSAGE,
    Answered,
    CallRefused,
    ClientConnection,
    Opened,
    ProtocolViolated,
    ServerConnection,
    failure,
)
from kybernate_shim.ttrpc.frames import MAX_DATA, Flags, Frame, FrameReader, Kind, Oversized


def request(stream: int, *, flags: int = 0, timeout_nano: int = 0, payload: bytes = b"") -> Frame:
    message = wire.Request(service="s", method="m", payload=payload, timeout_nano=timeout_nano)
    return Frame(stream, Kind.REQUEST, flags, message.SerializeToString())


def decode(data: bytes) -> tuple[int, wire.Response]:
    (frame,) = FrameReader().feed(data)
    assert isinstance(frame, Frame)
    assert (frame.kind, frame.flags) == (Kind.RESPONSE, 0)
    return frame.stream, wire.Response.FromString(frame.data)


def open_call(server: ServerConnection, stream: int) -> None:
    assert isinstance(server.receive(request(stream)), Opened)


REFUSALS: dict[str, tuple[Frame | Oversized, Code]] = {
    "even stream": (request(8), Code.INVALID_ARGUMENT),
    "stream zero": (request(0), Code.INVALID_ARGUMENT),
    "reused stream": (request(5), Code.INVALID_ARGUMENT),
    "decreasing stream": (request(3), Code.INVALID_ARGUMENT),
    "data for a stream that was never opened": (Frame(7, Kind.DATA, 0, b""), Code.INVALID_ARGUMENT),
    "garbage instead of a request": (Frame(7, Kind.REQUEST, 0, b"\xff\xff"), Code.INVALID_ARGUMENT),
    "service name that is no text": (Frame(7, Kind.REQUEST, 0, b"\x0a\x01\xff"), Code.INVALID_ARGUMENT),
    "oversized request": (Oversized(7, Kind.REQUEST, 0, MAX_DATA + 1), Code.RESOURCE_EXHAUSTED),
    "stream that stays open": (request(7, flags=Flags.REMOTE_OPEN), Code.UNIMPLEMENTED),
    "deadline in the past": (request(7, timeout_nano=-1), Code.DEADLINE_EXCEEDED),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_server_refuses(case: str) -> None:
    item, code = REFUSALS[case]
    server = ServerConnection()
    open_call(server, 5)
    refused = server.receive(item)
    assert isinstance(refused, CallRefused)
    stream, response = decode(refused.frame)
    assert (refused.stream, stream) == (item.stream, item.stream)
    assert refused.code == response.status.code == code
    assert response.status.message
    assert server.active == 1


@pytest.mark.parametrize("case", [case for case, (item, _) in REFUSALS.items() if item.stream == 7])
def test_refused_stream_is_used_up_unless_it_was_data(case: str) -> None:
    item, _ = REFUSALS[case]
    server = ServerConnection()
    server.receive(item)
    again = server.receive(request(7))
    assert isinstance(again, Opened if item.kind == Kind.DATA else CallRefused)


@pytest.mark.parametrize(
    "item",
    [
        Frame(7, Kind.RESPONSE, 0, b""),
        Frame(7, 0, 0, b"x"),
        Frame(7, 255, 255, b"x"),
        Frame(5, Kind.DATA, Flags.REMOTE_CLOSED | Flags.NO_DATA, b""),
        Oversized(7, 77, 0, MAX_DATA + 1),
    ],
)
def test_server_ignores(item: Frame | Oversized) -> None:
    server = ServerConnection()
    open_call(server, 5)
    assert server.receive(item) is None
    open_call(server, 7)


def test_request_that_closes_its_side_is_unary() -> None:
    assert isinstance(ServerConnection().receive(request(1, flags=Flags.REMOTE_CLOSED)), Opened)


def test_unknown_fields_of_a_request_are_skipped() -> None:
    frame = request(1)
    opened = ServerConnection().receive(frame._replace(data=frame.data + b"\xfa\x01\x03new"))
    assert isinstance(opened, Opened)
    assert opened.request.method == "m"


def test_call_is_answered_once() -> None:
    server = ServerConnection()
    open_call(server, 1)
    assert decode(server.fail(1, Code.DEADLINE_EXCEEDED, "late"))[1].status.code == Code.DEADLINE_EXCEEDED
    assert server.answer(1, b"too late") == b""
    assert server.fail(1, Code.UNKNOWN, "too late") == b""


def test_call_counts_until_its_handler_has_ended() -> None:
    server = ServerConnection(max_calls=1)
    open_call(server, 1)
    server.fail(1, Code.DEADLINE_EXCEEDED, "the handler still runs")
    refused = server.receive(request(3))
    assert isinstance(refused, CallRefused)
    assert refused.code == Code.RESOURCE_EXHAUSTED
    server.release(1)
    open_call(server, 5)


def test_requests_in_flight_are_bounded_in_bytes() -> None:
    server = ServerConnection(max_held=100)
    assert isinstance(server.receive(request(1, payload=bytes(60))), Opened)
    refused = server.receive(request(3, payload=bytes(60)))
    assert isinstance(refused, CallRefused)
    assert refused.code == Code.RESOURCE_EXHAUSTED
    server.release(1)
    assert isinstance(server.receive(request(5, payload=bytes(60))), Opened)


def test_draining_server_answers_what_is_open_and_refuses_the_rest() -> None:
    server = ServerConnection()
    open_call(server, 1)
    server.drain()
    refused = server.receive(request(3))
    assert isinstance(refused, CallRefused)
    assert refused.code == Code.UNAVAILABLE
    assert decode(server.answer(1, b"ok")) == (1, wire.Response(payload=b"ok"))


def test_answer_that_fits_no_frame_becomes_an_error() -> None:
    server = ServerConnection()
    open_call(server, 1)
    assert decode(server.answer(1, bytes(MAX_DATA)))[1].status.code == Code.RESOURCE_EXHAUSTED


def test_request_that_fits_no_frame_is_not_sent() -> None:
    client = ClientConnection()
    with pytest.raises(RpcError) as caught:
        client.request("s", "m", bytes(MAX_DATA), metadata={})
    assert caught.value.code == Code.RESOURCE_EXHAUSTED
    assert client.request("s", "m", b"", metadata={})[0] == 1


def test_stream_ids_are_odd_and_end() -> None:
    client = ClientConnection(first_stream=LAST_STREAM - 2)
    streams = [client.request("s", "m", b"", metadata={})[0] for _ in range(2)]
    assert streams == [LAST_STREAM - 2, LAST_STREAM]
    with pytest.raises(ConnectionError):
        client.request("s", "m", b"", metadata={})


@given(st.text() | st.text(st.characters(categories=["Cs"])), st.sampled_from(Code))
def test_failure_carries_any_text(text: str, code: Code) -> None:
    _, response = decode(failure(1, code, text))
    assert response.status.code == (code or Code.UNKNOWN)
    assert response.status.message == text.encode("utf-8", "replace").decode()
    assert response.payload == b""


def test_failure_cuts_long_text_between_characters() -> None:
    _, response = decode(failure(1, Code.UNKNOWN, "x" + "ä" * MAX_DATA))
    assert response.status.message == "x" + "ä" * ((MAX_MESSAGE - 1) // 2)


def received(client: ClientConnection, item: Frame | Oversized) -> bytes | RpcError:
    answered = client.receive(item)
    assert isinstance(answered, Answered)
    return answered.outcome


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (Frame(1, Kind.RESPONSE, 0, b"\xff"), Code.INTERNAL),
        (Oversized(1, Kind.RESPONSE, 0, MAX_DATA + 1), Code.RESOURCE_EXHAUSTED),
        (Frame(1, Kind.RESPONSE, 0, b"\x0a\x02\x08\x63"), Code.UNKNOWN),  # status code 99
        (Frame(1, Kind.RESPONSE, 0, b"\x0a\x02\x08\x05"), Code.NOT_FOUND),
    ],
)
def test_client_turns_into_an_error(item: Frame | Oversized, code: Code) -> None:
    client = ClientConnection()
    client.request("s", "m", b"", metadata={})
    outcome = received(client, item)
    assert isinstance(outcome, RpcError)
    assert outcome.code == code


def test_client_takes_status_ok_for_success() -> None:
    client = ClientConnection()
    client.request("s", "m", b"", metadata={})
    data = wire.Response(status=wire.Status(code=0), payload=b"p").SerializeToString()
    assert received(client, Frame(1, Kind.RESPONSE, 0, data)) == b"p"


VIOLATIONS: dict[str, tuple[Frame | Oversized, str]] = {
    "stream of the future": (Frame(5, Kind.RESPONSE, 0, b""), "never opened: response on stream 5"),
    "stream of the server": (Frame(2, Kind.RESPONSE, 0, b""), "never opened: response on stream 2"),
    "second answer": (Frame(1, Kind.RESPONSE, 0, b""), "closed by its answer: response on stream 1"),
    "data after the answer": (Frame(1, Kind.DATA, 0, b"ab"), r"closed by .* 2 bytes \(61 62\)"),
    "data of a call": (Frame(3, Kind.DATA, 0, b""), "only a response ends a call: data on stream 3"),
    "request": (Frame(3, Kind.REQUEST, 0, b""), "only a response ends a call: request on stream 3"),
    "stream that stays open": (Frame(3, Kind.RESPONSE, Flags.REMOTE_OPEN, b""), "ends its stream: .* flags 0x02"),
    "answer without one": (Frame(3, Kind.RESPONSE, Flags.NO_DATA, b""), "ends its stream: .* flags 0x04"),
    "large answer to no call": (Oversized(5, Kind.RESPONSE, 0, MAX_DATA + 1), "never opened: .* 4194305 bytes"),
    "large frame of any kind": (Oversized(3, 99, 0, MAX_DATA + 1), "too large: frame of kind 99 on stream 3"),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_violation_of_the_protocol_is_shown(case: str) -> None:
    item, text = VIOLATIONS[case]
    client = ClientConnection()
    for _ in range(2):
        client.request("s", "m", b"", metadata={})
    assert received(client, Frame(1, Kind.RESPONSE, 0, b"")) == b""
    with pytest.raises(ProtocolViolated, match=text):
        client.receive(item)


def test_long_frame_is_shown_in_part() -> None:
    with pytest.raises(ProtocolViolated) as caught:
        ClientConnection().receive(Frame(1, Kind.DATA, 0, bytes(MAX_DATA)))
    assert str(caught.value).endswith(f"4194304 bytes ({' '.join(['00'] * 32)} …)")


@pytest.mark.parametrize("item", [Frame(1, 9, 0, b""), Frame(7, 255, 255, b"x")])
def test_client_ignores_unknown_kinds(item: Frame) -> None:
    client = ClientConnection()
    client.request("s", "m", b"", metadata={})
    assert client.receive(item) is None
    assert received(client, Frame(1, Kind.RESPONSE, Flags.REMOTE_CLOSED, b"")) == b""


def test_late_answer_to_a_call_that_was_given_up_is_ignored_once() -> None:
    client = ClientConnection()
    client.request("s", "m", b"", metadata={})
    client.forget(1)
    assert client.receive(Frame(1, Kind.RESPONSE, 0, b"")) is None
    client.forget(1)
    with pytest.raises(ProtocolViolated, match="closed by its answer"):
        client.receive(Frame(1, Kind.RESPONSE, 0, b""))


def test_server_that_answers_no_calls_is_left() -> None:
    client = ClientConnection(max_given_up=2)
    for stream in (1, 3):
        client.request("s", "m", b"", metadata={})
        client.forget(stream)
    with pytest.raises(ConnectionError, match="2 calls without an answer"):
        client.request("s", "m", b"", metadata={})
    client.receive(Frame(3, Kind.RESPONSE, 0, b""))
    assert client.request("s", "m", b"", metadata={})[0] == 5


@given(
    st.text(),
    st.text(),
    st.binary(),
    st.dictionaries(st.text(), st.text()),
    st.integers(0, 2**63 - 1),
)
def test_request_arrives_as_it_was_sent(
    service: str, method: str, payload: bytes, metadata: dict[str, str], timeout_nano: int
) -> None:
    stream, data = ClientConnection().request(service, method, payload, metadata=metadata, timeout_nano=timeout_nano)
    opened = ServerConnection().receive(FrameReader().feed(data)[0])
    assert isinstance(opened, Opened)
    got = opened.request
    assert (opened.stream, got.service, got.method, got.payload) == (stream, service, method, payload)
    assert {pair.key: pair.value for pair in got.metadata} == metadata
    assert got.timeout_nano == timeout_nano


class Pair(RuleBasedStateMachine):
    """A client and a server joined by two byte queues, answering in any order; bytes move in pieces of any size.

    Each call expects its own payload back, or an error that names it, whichever was answered first.
    """

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.client, self.server = ClientConnection(), ServerConnection(max_calls=self.LIMIT)
        self.to_server, self.to_client = bytearray(), bytearray()
        self.server_reader, self.client_reader = FrameReader(), FrameReader()
        self.running: list[int] = []
        self.answers: dict[int, bytes | Code] = {}  # what the server has answered
        self.expected: set[int] = set()  # calls that the client waits for
        self.calls = 0

    @rule(payload=st.binary(max_size=50))
    def call(self, payload: bytes) -> None:
        stream, data = self.client.request("s", "m", payload, metadata={})
        self.to_server += data
        self.expected.add(stream)
        self.calls += 1

    @rule(size=st.integers(1, 200))
    def move_to_server(self, size: int) -> None:
        piece, self.to_server = bytes(self.to_server[:size]), self.to_server[size:]
        for item in self.server_reader.feed(piece):
            event = self.server.receive(item)
            if isinstance(event, Opened):
                self.running.append(event.stream)
            else:
                assert isinstance(event, CallRefused)
                assert event.code == Code.RESOURCE_EXHAUSTED
                assert len(self.running) == self.LIMIT
                self.send(event.stream, event.code, event.frame)

    @rule(size=st.integers(1, 200))
    def move_to_client(self, size: int) -> None:
        piece, self.to_client = bytes(self.to_client[:size]), self.to_client[size:]
        for item in self.client_reader.feed(piece):
            answered = self.client.receive(item)
            if answered is None:
                assert item.stream not in self.expected
                continue
            self.expected.remove(answered.stream)
            outcome = answered.outcome.code if isinstance(answered.outcome, RpcError) else answered.outcome
            assert outcome == self.answers[answered.stream]

    def send(self, stream: int, outcome: bytes | Code, frame: bytes) -> None:
        """Put an answer on its way, when it is the call's first."""
        assert bool(frame) == (stream not in self.answers)
        if frame:
            self.answers[stream] = outcome
            self.to_client += frame

    @precondition(lambda self: self.running)
    @rule(data=st.data(), well=st.booleans())
    def end_handler(self, data: st.DataObject, well: bool) -> None:
        stream = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if well:
            payload = b"answer to %d" % stream
            self.send(stream, payload, self.server.answer(stream, payload))
        else:
            self.send(stream, Code.NOT_FOUND, self.server.fail(stream, Code.NOT_FOUND, "gone"))
        self.server.release(stream)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.running))
        self.send(stream, Code.DEADLINE_EXCEEDED, self.server.fail(stream, Code.DEADLINE_EXCEEDED, "late"))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.expected)))
        self.client.forget(stream)
        self.expected.remove(stream)

    @invariant()
    def server_counts_its_handlers(self) -> None:
        assert self.server.active == len(self.running) <= self.LIMIT

    def teardown(self) -> None:
        """Let everything arrive: every call that was not given up has then been answered."""
        while self.to_server:
            self.move_to_server(200)
        for stream in self.running:
            self.send(stream, b"", self.server.answer(stream, b""))
            self.server.release(stream)
        while self.to_client:
            self.move_to_client(200)
        assert not self.expected
        assert len(self.answers) == self.calls
        assert self.server.active == self.server_reader.buffered == self.client_reader.buffered == 0


TestPair = Pair.TestCase
