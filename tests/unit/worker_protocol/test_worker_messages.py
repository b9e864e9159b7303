"""Frames and messages: what is sent arrives, and anything else is a typed error, whatever the bytes are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kybernate_shim.vram_io.saved_regions import SavedRegion
from kybernate_shim.worker_protocol import cuda_jobs, holder_jobs, mover_jobs
from kybernate_shim.worker_protocol.errors import ErrorTypes, MessageInvalid
from kybernate_shim.worker_protocol.frames import HEADER, MOST_BYTES, MessageReader, framed
from kybernate_shim.worker_protocol.messages import (
    FROM_WORKER,
    TO_WORKER,
    Answer,
    Cancel,
    Event,
    Failure,
    Form,
    Job,
    Progress,
    Request,
    answer_to,
    encoded,
)

FORMS: dict[str, Form[Any]] = {
    "to a worker": TO_WORKER,
    "from a worker": FROM_WORKER,
    "CUDA worker": cuda_jobs.JOBS,
    "holder": holder_jobs.JOBS,
    "VRAM mover": mover_jobs.JOBS,
}
KINDS = {
    "CUDA worker": cuda_jobs.CudaJob,
    "holder": holder_jobs.HolderJob,
    "VRAM mover": mover_jobs.MoverJob,
}
names = st.binary(min_size=1, max_size=20).filter(lambda name: b"\0" not in name).map(os.fsdecode)
paths = names.map(Path)
numbers = st.integers(0, (1 << 64) - 1)
small = st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]))
regions = st.builds(SavedRegion, texts, numbers, numbers, numbers, texts, st.none() | numbers, st.booleans())
files = st.builds(mover_jobs.ImageFiles, paths, small, st.none() | paths, texts)
JOBS = st.one_of(
    st.builds(mover_jobs.Save, st.dictionaries(small, small), files),
    st.builds(mover_jobs.ReadAhead, files, st.lists(regions, max_size=3)),
    st.builds(mover_jobs.CloseFiles, st.lists(small).map(tuple), paths),
    st.builds(
        mover_jobs.Release,
        st.lists(st.builds(mover_jobs.Inheritor, small, small, st.frozensets(small), small), max_size=3),
        st.lists(small),
        st.lists(st.tuples(small, small)),
        st.floats(allow_nan=False),
    ),
    st.builds(mover_jobs.Compare),
)


def cut(data: bytes, places: Sequence[int]) -> Iterator[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return (data[start:end] for start, end in pairwise(edges))


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(0)))
def test_messages_arrive_however_their_bytes_do(messages: list[bytes], places: list[int]) -> None:
    frames = MessageReader()
    found = [message for part in cut(b"".join(map(framed, messages)), places) for message in frames.feed(part)]
    assert found == messages
    assert frames.buffered == 0


def test_frame_that_is_too_long_is_refused_by_both_sides() -> None:
    with pytest.raises(MessageInvalid, match="at most"):
        framed(bytes(MOST_BYTES + 1))
    with pytest.raises(MessageInvalid, match="no frame"):
        list(MessageReader().feed(HEADER.pack(MOST_BYTES + 1)))


@given(st.text(min_size=4))
def test_text_is_no_frame(text: str) -> None:
    """As from a process of another release, or a program that happens to have the socket."""
    data = text.encode(errors="replace")
    if data[0] >= ord(" "):
        with pytest.raises(MessageInvalid, match="no frame"):
            list(MessageReader().feed(data))


@given(JOBS, st.integers(1, 1 << 40))
def test_job_arrives_as_it_was_sent(job: mover_jobs.MoverJob, number: int) -> None:
    (frame,) = MessageReader().feed(framed(encoded(Request(number, encoded(job)))))
    request = TO_WORKER.decoded(frame)
    assert isinstance(request, Request)
    assert request.number == number
    assert mover_jobs.JOBS.decoded(request.job) == job


@given(st.sampled_from([Cancel(3), Progress(7, 1 << 40), Event(1, encoded(1)), Answer(2, encoded([]))]))
def test_message_is_read_as_its_kind(message: Any) -> None:
    found = (TO_WORKER if isinstance(message, Cancel) else FROM_WORKER).decoded(encoded(message))
    assert type(found) is type(message)
    assert found.number == message.number


@pytest.mark.parametrize("form", FORMS)
@given(st.binary() | st.recursive(st.none() | st.integers(-5, 5) | st.text(), st.lists).map(msgspec.msgpack.encode))
@example(b"\x91" * 100_000)
@example(b"\xa1\xff")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x81\xa4type\xa3foo")
def test_bytes_that_are_no_message_are_a_typed_error(form: str, data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        FORMS[form].decoded(data)


@given(JOBS, st.data())
def test_job_with_a_change_is_refused_or_another_job(job: mover_jobs.MoverJob, data: st.DataObject) -> None:
    """Nothing but MessageInvalid is raised for a job of which a field is missing, is of another type, or unknown."""
    document = msgspec.msgpack.decode(encoded(job))
    name = data.draw(st.sampled_from([*document, "unknown"]))
    if data.draw(st.booleans()):
        document.pop(name, None)
    else:
        document[name] = data.draw(st.none() | st.text() | st.integers(-3, 3) | st.lists(st.integers(0, 3)))
    try:
        found = mover_jobs.JOBS.decoded(msgspec.msgpack.encode(document))
    except MessageInvalid as error:
        found, why = None, str(error)
    assert isinstance(found, Job) if found is not None else name in why or "type" in why


def test_missing_field_and_unknown_verb_are_named() -> None:
    with pytest.raises(MessageInvalid, match="missing required field `pid`"):
        holder_jobs.JOBS.decoded(msgspec.msgpack.encode({"type": "stop"}))
    with pytest.raises(MessageInvalid, match="Invalid value 'fly'"):
        holder_jobs.JOBS.decoded(msgspec.msgpack.encode({"type": "fly"}))


def test_what_cannot_be_sent_is_a_typed_error() -> None:
    with pytest.raises(MessageInvalid, match="a Lock that cannot be sent"):
        encoded(cuda_jobs.Lock(1 << 70, 1))
    with pytest.raises(MessageInvalid, match="a Failure that cannot be sent"):
        encoded(Failure(1, ErrorTypes(ValueError).fault_of(ValueError("x")).__class__("\udcff", "")))  # type: ignore[union-attr]


@pytest.mark.parametrize("worker", KINDS)
def test_each_job_has_a_verb_of_its_own_and_names_its_answer(worker: str) -> None:
    kinds = get_args(KINDS[worker])
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert kind.__doc__ != Job.__doc__
        with pytest.raises(MessageInvalid):
            answer_to(kind).decoded(b"\xc7\x00\x05")  # an extension, which no answer has


class Odd(ValueError):
    """Unknown to the protocol."""


@given(st.text(), st.lists(st.text()))
def test_error_arrives_as_the_nearest_class_that_is_known_with_its_notes(text: str, notes: list[str]) -> None:
    types: ErrorTypes[Exception] = ErrorTypes(ArithmeticError, (ValueError,))  # type: ignore[list-item]
    for kind, known in ((Odd, ValueError), (ZeroDivisionError, ArithmeticError), (MessageInvalid, MessageInvalid)):
        error = kind(text)
        for note in notes:
            error.add_note(note)
        fault = types.fault_of(error)
        assert fault is not None
        found = types.exception_of(msgspec.msgpack.decode(encoded(fault), type=type(fault)))
        assert type(found) is known
        assert getattr(found, "__notes__", []) == [note.encode(errors="backslashreplace").decode() for note in notes]
    assert types.fault_of(OSError()) is None
    assert types.fault_of(KeyboardInterrupt()) is None
