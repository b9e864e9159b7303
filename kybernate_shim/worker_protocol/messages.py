"""The messages, which every kind of worker and client understands, and the base of all jobs.

A job is a class of its own. Its type parameter is the type of its answer, which the client expects and the worker's
method returns, so that the type checker compares both sides.

    client to worker    Request: a job, by a number     Cancel: of the job with a number
    worker to client    Answer or Failure, one for each job, after any number of Progress and Event

Messages are structs of msgspec, as MessagePack. A path is sent as the bytes of its name, which need not be UTF-8.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import msgspec

from kybernate_shim.worker_protocol.errors import Fault, MessageInvalid

NO_JOB = 0  # the number of a failure that belongs to no job: a message was not readable

R = TypeVar("R")
S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

Encoded = msgspec.Raw  # a value within a message, whose type is known only later
J = TypeVar("J", bound="Job[Any]")


def verb_of(name: str) -> str:
    """Return the name on the wire and in logs of a class: SaveArena becomes save_arena."""
    return "".join(f"_{mark.lower()}" if mark.isupper() else mark for mark in name).lstrip("_")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=verb_of):
    """The base of all that is sent, which is never sent itself."""

    @property
    def verb(self) -> str:
        """The name on the wire and in logs."""
        return str(self.__struct_config__.tag)


class JobDone(msgspec.Struct, frozen=True):
    """The result of a job, of the type that the job names."""

    result: object


class Job(Message, Generic[R], frozen=True):
    """The base of all jobs; `R` is the type of the answer."""

    def done_by(self: J, work: Callable[[J], R]) -> JobDone:
        """Have `work` do the job, and return the answer."""
        return JobDone(work(self))


class Request(Message, frozen=True):
    """A job, encoded; answers name it by its `number`, which increases from 1 on."""

    number: int
    job: Encoded


class Cancel(Message, frozen=True):
    """End the job soon, if it has not ended: it is answered as any other, with a failure if it was not completed."""

    number: int


class Progress(Message, frozen=True):
    """How much of a job is done, in bytes."""

    number: int
    done: int


class Event(Message, frozen=True):
    """Something that the client has to know about a job before the job or the worker ends; encoded."""

    number: int
    event: Encoded


class Answer(Message, frozen=True):
    """The result of a job, encoded."""

    number: int
    result: Encoded


class Failure(Message, frozen=True):
    """Why there is no result; of NO_JOB, why the worker cannot continue."""

    number: int
    fault: Fault


ToWorker = Request | Cancel
FromWorker = Progress | Event | Answer | Failure


def encoded(value: object) -> Encoded:
    """Return the bytes of a value of any type that messages have. Raises MessageInvalid for one that does not fit."""
    try:
        return Encoded(msgspec.msgpack.encode(value, enc_hook=_path_bytes))
    except (OverflowError, ValueError) as error:  # UnicodeEncodeError among them
        raise MessageInvalid(f"a {type(value).__name__} that cannot be sent: {error}") from error


def changed(struct: S, **fields: Any) -> S:
    """Return a message, or an answer, with other values of some fields."""
    return msgspec.structs.replace(struct, **fields)


class Form(Generic[T]):
    """What a message is read as: `kind`, a class or a union, which the type checker knows as `T`; `name` in errors."""

    def __init__(self, kind: Any, name: str) -> None:
        self._kind = kind
        self._name = name

    def decoded(self, message: bytes | Encoded) -> T:
        """Return what is in a message. Raises MessageInvalid."""
        try:
            found: T = self._decoder.decode(message)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MessageInvalid(f"{error}") from error
        return found

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Any]:
        return msgspec.msgpack.Decoder(self._kind, dec_hook=_path_from)

    def __str__(self) -> str:
        return self._name


TO_WORKER: Form[ToWorker] = Form(ToWorker, "message to a worker")
FROM_WORKER: Form[FromWorker] = Form(FromWorker, "message of a worker")


def answer_to(kind: type[Job[R]]) -> Form[R]:
    """Return what the answers to a class of jobs are read as."""
    return _answer_to(kind)


@cache
def _answer_to(kind: type[Any]) -> Form[Any]:
    (named,) = (base for base in kind.__orig_bases__ if get_args(base))
    return Form(get_args(named)[0], f"answer to {verb_of(kind.__name__)}")


def _path_bytes(value: object) -> bytes:
    if isinstance(value, Path):
        return os.fsencode(value)
    raise TypeError(f"{type(value).__name__} is not a type of message")


def _path_from(kind: type, value: object) -> Path:
    if issubclass(kind, Path) and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
