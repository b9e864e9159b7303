"""Who holds the threads of a process: outlives who has asked for it, and lets go when the next one says so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kybernate_shim.arena.control import must_run
from kybernate_shim.cuda_helper.holders import Holders, Uncovered
from kybernate_shim.cuda_holder import holder as holders_process
from kybernate_shim.cuda_holder.holder import Holder
from kybernate_shim.linux.ptrace.tracee import InjectionFailed
from kybernate_shim.worker_protocol.frames import MessageReader, framed
from kybernate_shim.worker_protocol.holder_jobs import Covered, Held, Stop
from kybernate_shim.worker_protocol.messages import FROM_WORKER, Request, encoded
from tests.fakes.memory_process import MemoryProcess

SECONDS = 20.0


@pytest.fixture
def target() -> Iterator[MemoryProcess]:
    with MemoryProcess() as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the sockets are; no holder is left behind."""
    yield tmp_path / "holders"
    for process in running(tmp_path / "holders"):
        process.kill()


def running(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(word.startswith(f"{folder}/") for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def states(pid: int) -> set[str]:
    return {stat_of(task) for task in Path(f"/proc/{pid}/task").iterdir()}


def stat_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


async def gone(folder: Path) -> None:
    async with asyncio.timeout(SECONDS):
        while running(folder):  # noqa: ASYNC110  # other processes
            await asyncio.sleep(0.01)


def test_threads_are_stopped_until_they_may_go(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        holders = Holders(folder, [])
        for _ in range(2):  # by the same process
            hold = await holders.stop(target.pid, SECONDS)
            assert states(target.pid) == {"t"}
            await hold.let_go()
            assert target.ask("1 + 1") == 2
        assert len(running(folder)) == 1
        await holders.close()
        await gone(folder)

    asyncio.run(main())


def test_next_helper_finds_who_is_held(target: MemoryProcess, folder: Path) -> None:
    async def first() -> None:
        await Holders(folder, []).stop(target.pid, SECONDS)

    async def second() -> None:
        holders = Holders(folder, [])
        (hold,) = await holders.left_behind(SECONDS)
        assert (hold.pid, states(target.pid)) == (target.pid, {"t"})
        await hold.let_go()
        assert target.ask("1 + 1") == 2
        assert await holders.left_behind(0.1) == []
        await holders.close()

    asyncio.run(first())  # whose connections end with it
    assert states(target.pid) == {"t"}
    asyncio.run(second())
    asyncio.run(gone(folder))


def test_next_helper_finds_what_is_to_be_covered(target: MemoryProcess, folder: Path) -> None:
    async def first() -> None:
        uncovered = await Holders(folder, []).stop_until_covered([target.pid], by_caller=False)
        assert (uncovered.failures, states(target.pid)) == ((), {"t"})

    async def second() -> None:
        holders = Holders(folder, [])
        (left,) = await holders.left_behind(SECONDS)
        assert isinstance(left, Uncovered)
        assert (left.pids, states(target.pid)) == ({target.pid}, {"t"})
        assert await left.cover([target.pid]) == Covered()
        assert target.ask("1 + 1") == 2
        assert not left.pids
        await holders.close()

    asyncio.run(first())  # whose connections end with it
    asyncio.run(second())
    asyncio.run(gone(folder))


def test_each_process_resumes_when_it_is_covered(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        with MemoryProcess() as other:
            holders = Holders(folder, [])
            uncovered = await holders.stop_until_covered([target.pid, other.pid], by_caller=False)
            assert await uncovered.cover([target.pid]) == Covered()
            assert target.ask("1 + 1") == 2
            assert (uncovered.pids, states(other.pid)) == ({other.pid}, {"t"})
            other.kill()
            assert await uncovered.cover([other.pid]) == Covered()  # it has ended: there is nothing to report
            assert len(running(folder)) == 1  # for the next one
            await holders.close()
            await gone(folder)

    asyncio.run(main())


def test_threads_that_their_tracer_keeps_are_reported_unless_it_is_the_caller(
    target: MemoryProcess, folder: Path
) -> None:
    async def main() -> None:
        holders = Holders(folder, [])
        hold = await holders.stop(target.pid, SECONDS)
        uncovered = await holders.stop_until_covered([target.pid], by_caller=False)
        assert [pid for pid, _ in uncovered.failures] == [target.pid]
        assert [pid for pid, _ in (await uncovered.cover([target.pid])).failures] == [target.pid]
        uncovered = await holders.stop_until_covered([target.pid], by_caller=True)
        assert uncovered.failures == ()
        await hold.let_go()
        async with asyncio.timeout(SECONDS):
            while states(target.pid) != {"t"}:  # noqa: ASYNC110  # until the holder stops them
                await asyncio.sleep(0.01)
        assert await uncovered.cover([target.pid]) == Covered()
        assert target.ask("1 + 1") == 2
        await holders.close()

    asyncio.run(main())


def test_threads_resume_when_a_holder_is_killed_or_asked_no_more(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        holders = Holders(folder, [])
        uncovered = await holders.stop_until_covered([target.pid], by_caller=False)
        (process,) = running(folder)
        process.kill()
        with pytest.raises(InjectionFailed):
            await uncovered.cover([target.pid])
        assert target.ask("1 + 1") == 2
        stopping = asyncio.create_task(holders.stop_until_covered([target.pid], by_caller=False))
        while states(target.pid) != {"t"}:  # noqa: ASYNC110  # the answer comes later
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert await asyncio.to_thread(target.ask, "1 + 1") == 2
        await holders.close()

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b'{"let_go": true}\n', framed(b"\xc1"), framed(b""), b"\0"])
def test_what_is_no_request_lets_nothing_go(target: MemoryProcess, folder: Path, sent: bytes) -> None:
    async def first() -> None:
        await Holders(folder, []).stop(target.pid, SECONDS)

    async def second() -> None:
        holders = Holders(folder, [])
        (hold,) = await holders.left_behind(SECONDS)
        assert states(target.pid) == {"t"}
        await hold.let_go()
        assert target.ask("1 + 1") == 2
        await holders.close()

    asyncio.run(first())
    (path,) = folder.iterdir()
    with socket.socket(socket.AF_UNIX) as liar:
        liar.connect(str(path))
        liar.sendall(sent)
        liar.shutdown(socket.SHUT_WR)
        while liar.recv(4096):
            pass
    asyncio.run(second())
    asyncio.run(gone(folder))


def test_holder_is_no_child_of_its_helper_and_heeds_no_signal_that_asks(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        await Holders(folder, []).stop(target.pid, SECONDS)
        (process,) = running(folder)
        assert process not in psutil.Process().children(recursive=True)
        assert os.getsid(process.pid) == process.pid
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)

    asyncio.run(main())
    assert states(target.pid) == {"t"}
    assert len(running(folder)) == 1


def test_holder_of_a_process_that_has_ended_ends(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        await Holders(folder, []).stop(target.pid, SECONDS)

    asyncio.run(main())
    target.kill()
    asyncio.run(gone(folder))


def test_process_that_is_traced_cannot_be_held(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        one, other = Holders(folder, []), Holders(folder, [])
        hold = await one.stop(target.pid, SECONDS)
        with pytest.raises(InjectionFailed, match="traces it already"):
            await other.stop(target.pid, SECONDS)
        await hold.let_go()
        await (await other.stop(target.pid, SECONDS)).let_go()
        assert target.ask("1 + 1") == 2

    asyncio.run(main())


def test_holder_that_was_killed_while_it_was_warm_is_replaced(target: MemoryProcess, folder: Path) -> None:
    async def main() -> None:
        holders = Holders(folder, [])
        await (await holders.stop(target.pid, SECONDS)).let_go()
        (warm,) = running(folder)
        warm.kill()  # which the loop has not seen yet
        await (await holders.stop(target.pid, SECONDS)).let_go()
        assert target.ask("1 + 1") == 2

    asyncio.run(main())


def test_socket_of_a_holder_that_was_killed_is_removed(folder: Path) -> None:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "dead"))
    assert asyncio.run(Holders(folder, []).left_behind(SECONDS)) == []
    assert list(folder.iterdir()) == []


def test_helper_is_started_where_none_comes(
    target: MemoryProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders_process, "ORPHAN_SECONDS", 0.0)
    path, told = tmp_path / "socket", tmp_path / "told"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        serving = threading.Thread(target=Holder(listener).serve)
        serving.start()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            asked = [Held(), Stop(target.pid, SECONDS, ("/bin/touch", str(told)))]
            for number, job in enumerate(asked, 1):
                connection.sendall(framed(encoded(Request(number, encoded(job)))))
            answers, frames = [], MessageReader()
            while len(answers) < len(asked):
                answers += [FROM_WORKER.decoded(message) for message in frames.feed(connection.recv(4096))]
            assert [msgspec.msgpack.decode(answer.result) for answer in answers] == [0, None]
        until = time.monotonic() + SECONDS
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.01)
        target.kill()
        serving.join()
    assert told.exists()


def test_threads_that_have_to_work_are_spared() -> None:
    working = ("cuda-EvtHandlr", "cuda00001400006", "kybernate-arena")
    programs_own = ("python", "cud", "cuda", "cuda_server", "cuda-worker", "cudaStream", "cuda_prefetch")
    assert [name for name in (*working, *programs_own) if must_run(name)] == [*working]
