"""A worker and its client over a real socket: answers, progress, cancellation, lies, and the end of either."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import assert_never

import pytest

from kybernate_shim.worker_protocol.client import WorkerClient
from kybernate_shim.worker_protocol.errors import ErrorTypes, Fault, MessageInvalid, WorkerError
from kybernate_shim.worker_protocol.frames import MOST_BYTES, MessageReader, framed
from kybernate_shim.worker_protocol.messages import (
    FROM_WORKER,
    NO_JOB,
    Answer,
    Event,
    Failure,
    Form,
    FromWorker,
    Job,
    JobDone,
    Message,
    Progress,
    Request,
    ToWorker,
    encoded,
)
from kybernate_shim.worker_protocol.programs import VERSION, arguments, command
from kybernate_shim.worker_protocol.server import JobCall, WorkerServer, immediately, in_own_thread

SECONDS = 20.0
NAME = "the worker"


class Halve(Job[int], frozen=True):
    number: int


class Count(Job[list[int]], frozen=True):
    end: int


class Wait(Job[str], frozen=True):
    """Report what is known, and wait for the cancellation."""


class Odd(Exception):
    """A number cannot be halved."""


class Seen(Message, frozen=True):
    what: str


TestJob = Halve | Count | Wait
JOBS: Form[TestJob] = Form(TestJob, "job of a test")
SEEN: Form[Seen] = Form(Seen, "event of a test")
ERRORS = ErrorTypes(Odd)


def handle(job: TestJob, call: JobCall) -> JobDone:
    match job:
        case Halve():
            return job.done_by(_halved)
        case Count():
            return job.done_by(lambda job: list(range(job.end)))
        case Wait():
            return job.done_by(lambda _: _waited(call))
    assert_never(job)


def _halved(job: Halve) -> int:
    if job.number % 2:
        error = Odd(f"{job.number} is odd")
        error.add_note("so is 1")
        raise error
    return job.number // 2


def _waited(call: JobCall) -> str:
    call.report(7)
    call.tell(Seen("something"))
    return "cancelled" if call.cancelled.wait(SECONDS) else "late"


Story = Callable[[WorkerClient], Awaitable[None]]


def with_worker(story: Story, *, start: Callable[[Callable[[], None]], None] = in_own_thread) -> list[Exception]:
    """Run a story with a client of a worker in a thread; return how the worker ended, if not by the client's end."""
    ours, theirs = socket.socketpair()
    ends: list[Exception] = []

    def serve() -> None:
        with theirs:
            try:
                WorkerServer(theirs, JOBS, ERRORS, handle, start).serve()
            except (MessageInvalid, OSError) as error:
                ends.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    asyncio.run(_told(ours, story))
    thread.join(SECONDS)
    assert not thread.is_alive()
    return ends


async def _told(ours: socket.socket, story: Story) -> None:
    client = WorkerClient(*await asyncio.open_connection(sock=ours), NAME, ERRORS)
    try:
        async with asyncio.timeout(SECONDS):
            await story(client)
    finally:
        client.close()


def with_liar(told: bytes, story: Story) -> None:
    """Run a story with a client whose worker says this, whatever it is asked, and ends then."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(told)
        theirs.shutdown(socket.SHUT_WR)
        asyncio.run(_told(ours, story))


def message(one: FromWorker) -> bytes:
    return framed(encoded(one))


def test_jobs_are_answered_each_by_its_own_answer() -> None:
    async def story(client: WorkerClient) -> None:
        assert await asyncio.gather(*(client.do(Halve(2 * number)) for number in range(50))) == list(range(50))
        assert list(client.jobs) == []

    assert with_worker(story) == []


def test_answer_may_be_larger_than_any_buffer() -> None:
    """As the blocks of a program in the arena, of which there may be 65536."""

    async def story(client: WorkerClient) -> None:
        assert await client.do(Count(1 << 18)) == list(range(1 << 18))

    with_worker(story)


def test_error_of_a_worker_arrives_with_its_notes_and_the_next_job_is_done() -> None:
    async def story(client: WorkerClient) -> None:
        with pytest.raises(Odd, match="3 is odd") as caught:
            await client.do(Halve(3))
        assert caught.value.__notes__ == ["so is 1"]
        assert await client.do(Halve(4)) == 2

    with_worker(story, start=immediately)


def test_progress_and_events_arrive_before_the_answer_and_a_cancelled_job_ends() -> None:
    async def story(client: WorkerClient) -> None:
        seen: list[object] = []
        told = asyncio.Event()

        def on_event(event: object) -> None:
            seen.append(client.read(SEEN, event))  # type: ignore[arg-type]
            told.set()

        call = client.begin(Wait(), on_progress=seen.append, on_event=on_event)
        await told.wait()
        call.cancel()
        assert await call.result() == "cancelled"
        assert seen == [7, Seen("something")]

    with_worker(story)


def test_error_of_a_caller_is_raised_where_the_result_is_waited_for() -> None:
    async def story(client: WorkerClient) -> None:
        def fail(done: int) -> None:
            raise ZeroDivisionError("of the caller")

        call = client.begin(Wait(), on_progress=fail)
        with pytest.raises(ZeroDivisionError, match="of the caller"):
            await call.result()
        call.cancel()
        assert await client.do(Halve(4)) == 2

    with_worker(story)


def test_cancellation_of_a_job_that_has_ended_is_no_other_ones() -> None:
    async def story(client: WorkerClient) -> None:
        first = client.begin(Halve(2))
        await first.result()
        told = asyncio.Event()
        second = client.begin(Wait(), on_event=lambda event: told.set())
        await told.wait()
        first.cancel()
        assert await client.do(Halve(8)) == 4  # the cancellation has been read
        assert not second.answer.done()
        second.cancel()
        await second.result()

    with_worker(story)


def test_job_that_is_given_up_goes_on_and_its_answer_is_ignored() -> None:
    async def story(client: WorkerClient) -> None:
        call = client.begin(Wait())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await call.result()
        client.forget(call)
        call.cancel()
        assert await client.do(Halve(2)) == 1
        assert client.alive

    with_worker(story)


def test_what_is_no_job_of_the_worker_is_refused_by_name_and_the_next_is_done() -> None:
    class Fly(Job[None], frozen=True):
        pass

    async def story(client: WorkerClient) -> None:
        with pytest.raises(MessageInvalid, match=f"process {os.getpid()} sent an invalid job of a test: .*'fly'"):
            await client.do(Fly())
        with pytest.raises(MessageInvalid, match="Expected `int`, got `str`"):
            await client.do(Halve("4"))  # type: ignore[arg-type]
        assert await client.do(Halve(4)) == 2

    assert with_worker(story) == []


@pytest.mark.parametrize(
    "sent",
    [
        b'{"do": "compare"}\n',
        framed(b"\xc1"),
        framed(encoded(Request(0, encoded(Halve(2))))),
        framed(encoded(Progress(1, 1))),
    ],
    ids=["another dialect", "no message", "number that was given", "a worker's message"],
)
def test_stream_that_cannot_be_read_ends_the_worker_by_an_error_that_names_the_sender(sent: bytes) -> None:
    async def story(client: WorkerClient) -> None:
        client._writer.write(sent)
        with pytest.raises(
            MessageInvalid, match=f"{NAME} was sent a message that it cannot read: process {os.getpid()} sent"
        ):
            await client.do(Wait())
        assert not client.alive

    (error,) = with_worker(story)
    assert isinstance(error, MessageInvalid)
    assert f"process {os.getpid()} sent" in str(error)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (b"Traceback (most recent call last):\n", f"{NAME} sent no frame .*Traceback"),
        (framed(b"\xc1"), f"{NAME} sent an invalid message of a worker"),
        (message(Answer(1, encoded("two"))), f"{NAME} sent an invalid answer to halve: Expected `int`, got `str`"),
        (message(Progress(9, 1)), f"{NAME} sent progress for job 9, which it was not given"),
        (message(Failure(NO_JOB, Fault("MessageInvalid", "no"))), f"{NAME} was sent a message that it cannot read: no"),
        ((MOST_BYTES + 1).to_bytes(4, "big") + bytes(100), f"{NAME} sent no frame"),
    ],
    ids=["text", "no message", "another type", "another job", "refusal", "too long"],
)
def test_worker_that_lies_is_named(told: bytes, reason: str) -> None:
    async def story(client: WorkerClient) -> None:
        with pytest.raises(MessageInvalid, match=reason):
            await client.do(Halve(4))

    with_liar(told, story)


@pytest.mark.parametrize("told", [b"", message(Answer(1, encoded(2)))[:-1]], ids=["idle", "in a message"])
def test_worker_that_ends_fails_its_jobs_and_all_later_ones(told: bytes) -> None:
    async def story(client: WorkerClient) -> None:
        calls = [client.begin(Halve(2)), client.begin(Wait())]
        for call in calls:
            with pytest.raises(WorkerError, match=f"{NAME} has ended{'.* bytes into a message' if told else '$'}"):
                await call.result()
        with pytest.raises(WorkerError):
            await client.do(Halve(2))
        assert not client.alive

    with_liar(told, story)


def test_what_came_before_the_end_is_handed_out() -> None:
    async def story(client: WorkerClient) -> None:
        seen: list[int] = []
        call = client.begin(Wait(), on_progress=seen.append)
        other = client.begin(Halve(4))
        assert await other.result() == 2
        with pytest.raises(WorkerError):
            await call.result()
        assert seen == [3]

    told = message(Progress(1, 3)) + message(Event(7, encoded(0)))[:0] + message(Answer(2, encoded(2)))
    with_liar(told, story)


def test_error_that_is_unknown_here_arrives_as_the_base() -> None:
    async def story(client: WorkerClient) -> None:
        with pytest.raises(Odd, match="of a later release"):
            await client.do(Halve(4))

    with_liar(message(Failure(1, Fault("Newer", "of a later release"))), story)


def test_job_that_does_not_fit_fails_alone() -> None:
    async def story(client: WorkerClient) -> None:
        with pytest.raises(WorkerError, match="cannot be sent"):
            await client.do(Halve(1 << 70))
        assert await client.do(Halve(4)) == 2

    with_worker(story)


UNFORESEEN = """
import socket, sys
from tests.unit.worker_protocol.test_client_and_server import ERRORS, JOBS
from kybernate_shim.worker_protocol.programs import arguments
from kybernate_shim.worker_protocol.server import WorkerServer, immediately, serve_and_exit

def handle(job, call):
    raise OSError("of a kind that nothing foresees")

(fd,) = arguments(sys.argv)
serve_and_exit(WorkerServer(socket.socket(fileno=int(fd)), JOBS, ERRORS, handle, immediately))
"""


def program(*words: str, told: bytes) -> subprocess.CompletedProcess[str]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(told)
        ours.shutdown(socket.SHUT_WR)
        return subprocess.run(
            [sys.executable, "-c", UNFORESEEN, *words, *([str(theirs.fileno())] if words else [])],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=Path(__file__).parents[3],
            check=False,
        )


def test_error_that_was_not_foreseen_ends_the_worker_with_its_traceback() -> None:
    told = framed(encoded(Request(1, encoded(Halve(2)))))
    done = program(f"--protocol={VERSION}", told=told)
    assert done.returncode == 1
    assert "OSError: of a kind that nothing foresees" in done.stderr


@pytest.mark.parametrize("words", [[], ["3"], [f"--protocol={VERSION + 1}"]])
def test_program_that_another_release_has_started_says_so(words: list[str]) -> None:
    done = program(*words, told=b"")
    assert done.returncode == 1
    assert "was started by a process of another release" in done.stderr
    assert "Traceback" not in done.stderr


def test_command_is_what_the_program_reads() -> None:
    assert command("module", "3", "more")[:3] == [sys.executable, "-m", "module"]
    assert arguments(["worker.py", *command("module", "3", "more")[3:]]) == ["3", "more"]


def test_messages_of_a_worker_are_not_those_to_one() -> None:
    (frame,) = MessageReader().feed(message(Progress(1, 2)))
    assert isinstance(FROM_WORKER.decoded(frame), Progress)
    assert Progress not in ToWorker.__args__
