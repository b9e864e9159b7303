"""Frames: the same ones however the bytes are cut, and never more than one of them in memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.ttrpc.frames import HEADER, MAX_DATA, Frame, FrameReader, Oversized

FRAMES = st.lists(
    st.builds(
        Frame,
        stream=st.integers(0, 2**32 - 1),
        kind=st.integers(0, 255),
        flags=st.integers(0, 255),
        data=st.binary(max_size=300),
    )
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [*sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def read(pieces: list[bytes]) -> list[Frame | Oversized]:
    reader = FrameReader()
    return [item for piece in pieces for item in reader.feed(piece)]


@given(FRAMES, st.lists(st.integers(0, 10_000)))
def test_frames_survive_any_cut(frames: list[Frame], places: list[int]) -> None:
    assert read(cut(b"".join(frame.encode() for frame in frames), places)) == frames


@given(FRAMES)
def test_frames_arrive_byte_by_byte(frames: list[Frame]) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    assert read([bytes([byte]) for byte in stream]) == frames


@given(st.binary(), st.lists(st.integers(0, 10_000)))
def test_garbage_reads_the_same_however_it_is_cut(data: bytes, places: list[int]) -> None:
    assert read(cut(data, places)) == read([data])


def test_frame_is_given_out_with_its_last_byte() -> None:
    data = Frame(7, 1, 0, b"abc").encode()
    reader = FrameReader()
    assert reader.feed(data[:-1]) == []
    assert reader.buffered == len(data) - 1
    assert reader.feed(data[-1:]) == [Frame(7, 1, 0, b"abc")]
    assert reader.buffered == 0


def test_largest_frame_passes() -> None:
    frame = Frame(1, 1, 0, bytes(MAX_DATA))
    assert read([frame.encode()]) == [frame]


def test_larger_frame_is_not_encoded() -> None:
    with pytest.raises(ValueError, match=str(MAX_DATA + 1)):
        Frame(1, 1, 0, bytes(MAX_DATA + 1)).encode()


@given(st.lists(st.integers(0, 2 * MAX_DATA), max_size=4))
def test_oversized_frame_is_skipped_to_its_last_byte(places: list[int]) -> None:
    oversized = HEADER.pack(MAX_DATA + 1, 5, 1, 0) + bytes(MAX_DATA + 1)
    after = Frame(7, 1, 0, b"after")
    assert read(cut(oversized + after.encode(), places)) == [Oversized(5, 1, 0, MAX_DATA + 1), after]


def test_oversized_frame_is_reported_before_its_data_comes() -> None:
    assert read([HEADER.pack(2**32 - 1, 9, 1, 0)]) == [Oversized(9, 1, 0, 2**32 - 1)]


def test_oversized_frame_takes_no_memory() -> None:
    reader = FrameReader()
    reader.feed(HEADER.pack(2**32 - 1, 9, 1, 0))
    piece = bytes(1 << 18)
    tracemalloc.start()
    try:
        for _ in range((1 << 26) // len(piece)):
            assert reader.feed(piece) == []
            assert reader.buffered == 0
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=64)))
def test_reader_holds_less_than_one_frame(pieces: list[bytes]) -> None:
    reader = FrameReader()
    for piece in pieces:
        reader.feed(piece)
        assert reader.buffered < HEADER.size + MAX_DATA
