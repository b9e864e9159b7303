"""The side that has a worker: any number of jobs in progress on one connection, on the event loop.

A job that its caller gave up continues in the worker, unless the caller cancels it; its answer is ignored. When the
worker ends, or sends what is not a message, all waiting and all later jobs fail: WorkerError, MessageInvalid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

from kybernate_shim.worker_protocol.errors import ErrorTypes, MessageInvalid, WorkerError
from kybernate_shim.worker_protocol.frames import MessageReader, framed
from kybernate_shim.worker_protocol.messages import (
    FROM_WORKER,
    NO_JOB,
    Answer,
    Cancel,
    Encoded,
    Event,
    Failure,
    Form,
    FromWorker,
    Job,
    Message,
    Progress,
    Request,
    answer_to,
    encoded,
)

READ_BYTES = 256 << 10

R = TypeVar("R")
OnProgress = Callable[[int], None]
OnEvent = Callable[[Encoded], None]


async def _no_epitaph() -> str:
    return "has ended"


class PendingJob(Generic[R]):
    """A job that a worker has. Progress and events also arrive while nothing waits for the result."""

    def __init__(self, client: WorkerClient, number: int, job: Job[R], on_progress: OnProgress, on_event: OnEvent):
        self.job = job
        self.on_progress = on_progress
        self.on_event = on_event
        self.answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._client = client
        self._number = number

    async def ended(self) -> None:
        """Wait until there is an answer, or a failure."""
        await asyncio.wait([self.answer])

    async def result(self) -> R:
        """Wait for the answer; the wait may be cancelled, and begun again.

        Raises what the worker has raised, and a WorkerError.
        """
        await self.ended()
        return self._client.read(answer_to(type(self.job)), self.answer.result())

    def cancel(self) -> None:
        """Have the worker end the job soon; `result` reports how it has ended."""
        self._client.send(Cancel(self._number))

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # a job that was given up fails silently


class WorkerClient:
    """A connection to a worker, `name` in errors. To be made on the event loop, which reads from it from then on.

    `epitaph` says how the worker has ended, when it has: "was killed by SIGKILL".
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        errors: ErrorTypes[Any],
        epitaph: Callable[[], Awaitable[str]] = _no_epitaph,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._name = name
        self._errors = errors
        self._epitaph = epitaph
        self._numbers = count(NO_JOB + 1)
        self._calls: dict[int, PendingJob[Any]] = {}
        self._begun = NO_JOB
        self._broken: WorkerError | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether the worker can be given a job, as far as is known."""
        return self._broken is None and not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def jobs(self) -> Collection[Job[Any]]:
        """The jobs whose answers are waited for."""
        return [call.job for call in self._calls.values()]

    async def do(self, job: Job[R], *, seconds: float | None = None, on_event: OnEvent = lambda event: None) -> R:
        """Have a job done and return its result; the job continues when this is cancelled.

        Raises what the worker has raised, a WorkerError, and TimeoutError after `seconds`.
        """
        call = self.begin(job, on_event=on_event)
        try:
            async with asyncio.timeout(seconds):
                return await call.result()
        finally:
            self.forget(call)

    def begin(
        self, job: Job[R], *, on_progress: OnProgress = lambda done: None, on_event: OnEvent = lambda event: None
    ) -> PendingJob[R]:
        """Give the worker a job; `forget` has to follow. `on_progress` receives the bytes done so far."""
        number = self._begun = next(self._numbers)
        call = PendingJob(self, number, job, on_progress, on_event)
        self._calls[number] = call
        try:
            self.send(Request(number, encoded(job)))
        except WorkerError as error:
            call.fail(error)
        return call

    def forget(self, call: PendingJob[Any]) -> None:
        """Stop waiting for the answer. Idempotent."""
        self._calls = {number: one for number, one in self._calls.items() if one is not call}

    def send(self, message: Message) -> None:
        """Raises a WorkerError where the worker has ended, as far as is known, or the message does not fit."""
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)
        self._writer.write(framed(encoded(message)))

    def read(self, form: Form[R], message: bytes | Encoded) -> R:
        """Return what the worker has sent. Raises MessageInvalid, which names the worker."""
        try:
            return form.decoded(message)
        except MessageInvalid as error:
            raise MessageInvalid(f"{self._name} sent an invalid {form}: {error}") from error

    def close(self) -> None:
        """End the connection; the jobs in progress fail."""
        self._writer.close()
        self._break(WorkerError(f"the connection to {self._name} was closed"))
        self._reading.cancel()

    async def _read(self) -> None:
        """Deliver messages until the worker ends; those that arrived before that are delivered first."""
        frames = MessageReader()
        try:
            while data := await self._received():
                for message in self._cut(frames, data):
                    self._receive(self.read(FROM_WORKER, message))
            rest = f", {frames.buffered} bytes into a message" if frames.buffered else ""
            self._break(WorkerError(f"{self._name} {await self._epitaph()}{rest}"))
        except MessageInvalid as error:
            self._break(error)
        finally:
            self._break(WorkerError(f"the connection to {self._name} was closed"))
            self._writer.close()

    async def _received(self) -> bytes:
        try:
            return await self._reader.read(READ_BYTES)
        except ConnectionError:
            return b""

    def _cut(self, frames: MessageReader, data: bytes) -> Iterator[bytes]:
        try:
            yield from frames.feed(data)
        except MessageInvalid as error:
            raise MessageInvalid(f"{self._name} sent {error}") from error

    def _receive(self, message: FromWorker) -> None:
        if isinstance(message, Failure) and message.number == NO_JOB:
            raise MessageInvalid(f"{self._name} was sent a message that it cannot read: {message.fault.text}")
        if not NO_JOB < message.number <= self._begun:
            raise MessageInvalid(f"{self._name} sent {message.verb} for job {message.number}, which it was not given")
        call = self._calls.get(message.number)
        if call is None or call.answer.done():
            return  # given up
        try:
            self._hand_out(message, call)
        except MessageInvalid:
            raise
        except Exception as error:  # noqa: BLE001  # of the job's caller, for the one who waits for its result
            call.fail(error)

    def _hand_out(self, message: FromWorker, call: PendingJob[Any]) -> None:
        match message:
            case Progress():
                call.on_progress(message.done)
            case Event():
                call.on_event(message.event)
            case Answer():
                call.answer.set_result(message.result)
            case Failure():
                call.fail(self._errors.exception_of(message.fault))

    def _break(self, error: WorkerError) -> None:
        """Fail all jobs with the first of these errors, each with its own instance."""
        self._broken = self._broken or error
        for call in self._calls.values():
            call.fail(type(self._broken)(*self._broken.args))
