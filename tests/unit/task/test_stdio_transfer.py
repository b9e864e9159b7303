"""The copy of one stream as a state machine: every byte arrives once, in order, whatever the system calls answer."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.task.transfer import BLOCK_BYTES, BLOCKS_PER_TURN, ENDED, READING, WRITING, StreamTransfer

FULL = OSError(errno.ENOSPC, "No space left on device")
# What one system call does: None refuses for now, an OSError for good, a number is how many bytes it moves at most
answers = st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=40)
answers_of_a_full_disk = st.lists(st.one_of(st.none(), st.integers(1, 9), st.just(FULL)), max_size=40)


class Source:
    """A descriptor that hands out `data` in pieces, then its end. Out of answers, it gives all it has."""

    def __init__(self, data: bytes, answers: list[int | None]) -> None:
        self.data, self.answers = data, answers

    def read(self, size: int) -> bytes | None:
        answer = self.answers.pop(0) if self.answers else size
        if answer is None:
            return None
        block, self.data = self.data[: min(answer, size)], self.data[min(answer, size) :]
        return block


class Sink:
    """A descriptor that takes what `answers` say. Out of answers, it takes everything."""

    def __init__(self, answers: Sequence[int | OSError | None]) -> None:
        self.taken = bytearray()
        self.answers = list(answers)

    def write(self, data: memoryview) -> int | None:
        answer = self.answers.pop(0) if self.answers else len(data)
        if isinstance(answer, OSError):
            raise answer
        if answer is not None:
            self.taken += data[:answer]
        return answer if answer is None else min(answer, len(data))


def run(source: Source, sink: Sink, *, keep_draining: bool = True) -> StreamTransfer:
    transfer = StreamTransfer(source.read, sink.write, keep_draining=keep_draining)
    while (state := transfer.advance()) != ENDED:
        assert transfer.held <= BLOCK_BYTES
        assert (state == WRITING) == bool(transfer.held)
    return transfer


@given(st.binary(max_size=200), answers, answers)
def test_bytes_in_are_bytes_out(data: bytes, reads: list[int | None], writes: list[int | None]) -> None:
    sink = Sink(writes)
    transfer = run(Source(data, reads), sink)
    assert (bytes(sink.taken), transfer.lost, transfer.held) == (data, 0, 0)


@given(st.binary(max_size=200), answers, answers_of_a_full_disk)
def test_bytes_in_are_bytes_out_and_bytes_counted_as_lost(
    data: bytes, reads: list[int | None], writes: list[int | OSError | None]
) -> None:
    sink = Sink(writes)
    source = Source(data, reads)
    transfer = run(source, sink)
    assert len(sink.taken) + transfer.lost == len(data)
    assert source.data == b""
    rest = iter(data)
    assert all(byte in rest for byte in sink.taken), "what arrived is not in the order of what was sent"


@given(st.binary(min_size=1, max_size=200), answers)
def test_refusal_ends_a_transfer_that_need_not_drain(data: bytes, reads: list[int | None]) -> None:
    sink = Sink([FULL])
    transfer = run(Source(data, reads), sink, keep_draining=False)
    assert (transfer.advance(), transfer.refusal, bytes(sink.taken)) == (ENDED, FULL, b"")


def test_refusal_is_forgotten_once_the_sink_takes_bytes_again() -> None:
    source, sink = Source(b"lostkept", [4, None, 4, None]), Sink([FULL])
    transfer = StreamTransfer(source.read, sink.write, keep_draining=True)
    assert (transfer.advance(), transfer.refusal, transfer.lost) == (READING, FULL, 4)
    assert (transfer.advance(), transfer.refusal, transfer.lost) == (READING, None, 4)
    assert sink.taken == b"kept"


def test_blocked_sink_stops_the_reading() -> None:
    source, sink = Source(b"x" * (3 * BLOCK_BYTES), []), Sink([None, None, 1, None])
    transfer = StreamTransfer(source.read, sink.write, keep_draining=True)
    assert [transfer.advance() for _ in range(3)] == [WRITING] * 3
    assert (len(source.data), transfer.held) == (2 * BLOCK_BYTES, BLOCK_BYTES - 1)


def test_endless_source_does_not_keep_the_turn() -> None:
    sink = Sink([])
    transfer = StreamTransfer(lambda size: bytes(size), sink.write, keep_draining=True)
    assert transfer.advance() == READING
    assert len(sink.taken) == BLOCKS_PER_TURN * BLOCK_BYTES
