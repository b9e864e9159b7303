"""A process's output through FIFOs whose clients come, go, read slowly, or never open."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import stat
import sys

from tests.contract.stdio_bench import DEADLINE, Bench, Run, fixture_bench, read_some, read_to_end, until, would_block

__all__ = ["fixture_bench"]

PIPE_BYTES = 64 * 1024


def test_each_output_reaches_its_fifo_and_ends_with_the_process(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        out, err = b.fifo("out"), b.fifo("err")
        clients = b.reader(out), b.reader(err)
        stdio = await b.open(stdout=out, stderr=err)
        await b.shell(stdio, "echo to out; echo to err >&2")
        assert await stdio.drained(DEADLINE)
        assert [await read_to_end(client) for client in clients] == [b"to out\n", b"to err\n"]

    bench(work)


def test_client_sees_the_end_without_delete(bench: Run[None]) -> None:
    """A client calls Delete only after the end of the output: it must come while everything else is still open."""

    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        await b.shell(await b.open(stdin, out), "exec cat </dev/null")
        assert await read_to_end(client) == b""

    bench(work)


def test_ten_megabytes_arrive_unchanged(bench: Run[None]) -> None:
    data = os.urandom(1 << 20) * 10

    async def work(b: Bench) -> None:
        source = b.directory / "data"
        source.write_bytes(data)
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out)
        await b.start(stdio, "cat", str(source))
        assert hashlib.sha256(await read_to_end(client)).digest() == hashlib.sha256(data).digest()
        assert await stdio.drained(DEADLINE)

    bench(work)


def test_one_gigabyte_flows_in_bounded_memory(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        out = b.fifo("out")
        counter = b.children.spawn(["/bin/sh", "-c", f"test $(cat {out} | wc -c) = {1 << 30}"])
        stdio = await b.open(stdout=out)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await b.start(stdio, "head", "-c", str(1 << 30), "/dev/zero")
        assert await stdio.drained(3 * DEADLINE)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert (await counter.exited).status == 0, "not all bytes arrived"
        assert after.ru_maxrss - before.ru_maxrss < 4096, "KiB grown"
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # The CPU time of the copy alone, so that neighbours do not count: at least 500 MB per second of it
        assert spent < (1 << 30) / 500e6, f"{(1 << 30) / 1e6 / spent:.0f} MB per second of CPU time"

    bench(work)


def test_slow_reader_stops_the_process_and_loses_nothing(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        written = b.directory / "written"
        script = (
            "import os, sys\n"
            "for n in range(1, 401): os.write(1, bytes([n % 251]) * 4096); open(sys.argv[1], 'a').write('.')"
        )
        stdio = await b.open(stdout=out)
        await b.start(stdio, sys.executable, "-c", script, str(written))
        await until(lambda: written.exists() and written.stat().st_size >= 2 * PIPE_BYTES // 4096, "two pipes are full")
        await asyncio.sleep(0.3)  # what does not stop it now would let it write on
        # in the FIFO, in the process's pipe, and the block that the copy holds
        assert written.stat().st_size * 4096 <= 3 * PIPE_BYTES
        assert not await stdio.drained(0)
        assert await read_to_end(client) == b"".join(bytes([n % 251]) * 4096 for n in range(1, 401))
        assert await stdio.drained(DEADLINE)

    bench(work)


def test_client_may_leave_and_another_go_on(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out)
        child = await b.start(stdio, "cat")
        typist = b.writer(stdin)
        os.write(typist, b"first")
        assert await read_some(client) == b"first"
        os.close(client)
        os.write(typist, b"second")
        os.close(typist)
        await asyncio.sleep(0.2)  # written while no process reads: by then an error or a loss would have happened
        second = b.reader(out)
        assert await read_some(second) == b"second"
        os.close(second)
        typist = b.writer(stdin)
        os.write(typist, b"third")
        third = b.reader(out)
        assert await read_some(third) == b"third"
        assert not child.exited.done()
        stdio.close_stdin()
        os.close(typist)
        assert await read_to_end(third) == b""
        assert (await child.exited).status == 0
        assert b.logged.entries == []

    bench(work)


def test_client_that_opens_late_gets_all_of_a_short_output(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        out = b.fifo("out")
        opening = asyncio.create_task(b.open(stdout=out))
        await asyncio.sleep(0.1)
        assert not opening.done()
        client = b.reader(out)
        stdio = await opening
        child = await b.shell(stdio, "echo short")
        await child.exited
        assert await stdio.drained(DEADLINE)
        assert await read_to_end(client) == b"short\n"

    bench(work)


def test_client_that_never_opens_holds_nobody_up(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=(out := b.fifo("out")), client_seconds=0.05)
        child = await b.shell(stdio, "echo kept; exec cat /dev/zero")
        client = b.reader(out)
        assert await read_some(client, 5) == b"kept\n"
        child.kill()
        os.close(client)

    bench(work)


def test_one_fifo_for_both_outputs_ends_once_and_complete(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out, stderr=out)
        await b.shell(stdio, "echo first >&2; exec 2>&-; sleep 0.2; echo last")
        assert sorted((await read_to_end(client)).split()) == [b"first", b"last"]

    bench(work)


def test_background_process_keeps_the_output_open_until_close(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out)
        child = await b.shell(stdio, "sleep 1000 & echo over")
        await asyncio.shield(child.exited)
        assert not await stdio.drained(0.1)
        assert await read_some(client) == b"over\n"
        assert would_block(client)
        stdio.close()
        assert await read_to_end(client) == b""
        os.killpg(child.pid, 9)

    bench(work)


def test_output_that_nobody_took_is_counted_when_it_is_given_up(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out)
        child = await b.start(stdio, "head", "-c", "100000", "/dev/zero")
        await child.exited
        assert not await stdio.drained(0.1)
        stdio.close()
        assert b.logged.named("output.lost") == [
            {"event": "output.lost", "stream": "stdout", "bytes": 100000 - PIPE_BYTES}
        ]
        assert len(await read_to_end(client)) == PIPE_BYTES

    bench(work)


def test_unnamed_streams_are_dev_null(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(err := b.fifo("err"))
        stdio = await b.open(stderr=err)
        assert set(stdio.fds) == {2}
        script = "import os; os.write(2, ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1)).encode())"
        await b.start(stdio, sys.executable, "-c", script)
        assert await read_to_end(client) == b"/dev/null /dev/null"
        assert stdio.console_socket is None
        stdio.resize(80, 25)
        stdio.close_stdin()

    bench(work)


def test_streams_that_were_pipes_are_pipes_again(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(piped=(0, 1, 2))
        assert all(stat.S_ISFIFO(os.fstat(stdio.fds[number]).st_mode) for number in (0, 1, 2))
        child = await b.shell(stdio, "cat && head -c 1000000 /dev/zero && head -c 1000000 /dev/zero >&2")
        assert (await child.exited).status == 0
        assert await stdio.drained(DEADLINE)

    bench(work)
