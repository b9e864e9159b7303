"""The worker's side: reads jobs from a socket, has them done, and answers. Without an event loop.

A job that cannot be read is answered by a failure that names its sender, and the next one is served. An exception that
the protocol does not name is unexpected: its traceback is written to stderr, and the process ends, since a client would
wait forever for a worker that has lost a thread.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from kybernate_shim.linux.socket_peer import peer_of
from kybernate_shim.worker_protocol.errors import ErrorTypes, Fault, MessageInvalid
from kybernate_shim.worker_protocol.frames import MessageReader, framed
from kybernate_shim.worker_protocol.messages import (
    NO_JOB,
    TO_WORKER,
    Answer,
    Cancel,
    Event,
    Failure,
    Form,
    FromWorker,
    JobDone,
    Message,
    Progress,
    Request,
    ToWorker,
    encoded,
)

READ_BYTES = 256 << 10
UNFORESEEN_STATUS, INVALID_STATUS = 1, 2

J = TypeVar("J")


class JobCall:
    """A job in the worker: what it reports, and whether it was cancelled."""

    def __init__(self, number: int, send: Callable[[FromWorker], None]) -> None:
        self.cancelled = threading.Event()
        self._events = [self.cancelled]
        self._number = number
        self._send = send

    def when_cancelled(self, event: threading.Event) -> None:
        """Have a cancellation set this event, too."""
        self._events.append(event)
        if self.cancelled.is_set():
            event.set()

    def cancel(self) -> None:
        for event in self._events:
            event.set()

    def report(self, done: int) -> None:
        """Report how many bytes are done."""
        self._send(Progress(self._number, done))

    def tell(self, event: Message) -> None:
        """Send an event; it has left the process when this returns."""
        self._send(Event(self._number, encoded(event)))


class WorkerServer(Generic[J]):
    """Serves one connection. `jobs` are the jobs of this worker, each of which `handle` does.

    `start` executes a job immediately, in a thread, or in its turn.
    """

    def __init__(
        self,
        connection: socket.socket,
        jobs: Form[J],
        errors: ErrorTypes[Any],
        handle: Callable[[J, JobCall], JobDone],
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        self._connection = connection
        self._client = client_of(connection)
        self._jobs = jobs
        self._errors = errors
        self._handle = handle
        self._start = start
        self._writing = threading.Lock()
        self._calls: dict[int, JobCall] = {}
        self._last = NO_JOB

    def serve(self) -> None:
        """Return when the client has closed its end. Raises MessageInvalid where its bytes are not of the protocol.

        Raises OSError where the client has ended.
        """
        frames = MessageReader()
        try:
            while data := self._connection.recv(READ_BYTES):
                for message in frames.feed(data):
                    self._receive(TO_WORKER.decoded(message))
        except MessageInvalid as error:
            fault = Fault(MessageInvalid.__name__, f"{self._client} sent {error}")
            self._send(Failure(NO_JOB, fault))
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(READ_BYTES):  # or a client that still writes would lose the reason
                pass
            raise MessageInvalid(fault.text) from error

    def _receive(self, message: ToWorker) -> None:
        if isinstance(message, Cancel):
            if (call := self._calls.get(message.number)) is not None:  # or it has ended meanwhile
                call.cancel()
            return
        if message.number <= self._last:
            raise MessageInvalid(f"job {message.number} after job {self._last}")
        self._last = message.number
        try:
            job = self._jobs.decoded(message.job)
        except MessageInvalid as error:
            fault = Fault(MessageInvalid.__name__, f"{self._client} sent an invalid {self._jobs}: {error}")
            self._send(Failure(message.number, fault))
            return
        call = self._calls[message.number] = JobCall(message.number, self._send)
        self._start(partial(self._work, message, job, call))

    def _work(self, request: Request, job: J, call: JobCall) -> None:
        try:
            answer = self._answer(request.number, job, call)
        except BaseException:  # noqa: BLE001  # see above
            with suppress(OSError):  # stderr may be closed
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(UNFORESEEN_STATUS)
        self._calls.pop(request.number, None)
        with suppress(OSError):  # the client has ended, which `serve` sees, too
            self._send(answer)

    def _answer(self, number: int, job: J, call: JobCall) -> Answer | Failure:
        try:
            return Answer(number, encoded(self._handle(job, call).result))
        except Exception as error:
            if (fault := self._errors.fault_of(error)) is None:
                raise
            return Failure(number, fault)

    def _send(self, message: FromWorker) -> None:
        frame = framed(encoded(message))
        with self._writing:
            self._connection.sendall(frame)


def serve_and_exit(server: WorkerServer[Any], at_end: Callable[[], None] = lambda: None) -> NoReturn:
    """Serve one connection and end the process then, whatever its threads wait for: the kernel releases what is held.

    `at_end` is called before, when the client has closed its end, or has ended.

    Invalid messages of the client are also written to stderr, for the client's report on the worker's end.
    """
    status = 0
    try:
        server.serve()
    except OSError:
        pass  # the client is gone
    except MessageInvalid as error:
        status = INVALID_STATUS
        with suppress(OSError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
    at_end()
    os._exit(status)


def client_of(connection: socket.socket) -> str:
    """Return a name for the process at the other end, as far as the kernel knows it."""
    return f"process {peer_of(connection).pid}"


def immediately(work: Callable[[], None]) -> None:
    """Do a job before the next one is read."""
    work()


def in_own_thread(work: Callable[[], None]) -> None:
    """Do a job in parallel with all others."""
    threading.Thread(target=work, daemon=True).start()
