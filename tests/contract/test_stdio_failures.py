"""What cannot be opened, is cancelled or never started leaves nothing behind; who owns the pipes."""

from __future__ import annotations

import asyncio
import os

import pytest

from kybernate_shim.errors import Invalid
from tests.contract.stdio_bench import DEADLINE, Bench, Run, fixture_bench, read_to_end

__all__ = ["fixture_bench"]


@pytest.mark.root
def test_pipes_belong_to_the_user_of_the_container(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(b.fifo("in"), out, uid=1234, gid=5678, piped=(2,))
        owners = {(os.fstat(fd).st_uid, os.fstat(fd).st_gid) for fd in stdio.fds.values()}
        assert (set(stdio.fds), owners) == ({0, 1, 2}, {(1234, 5678)})
        os.close(client)

    bench(work)


@pytest.mark.parametrize(
    ("stdin", "stdout", "stderr", "error"),
    [
        ("", "{d}/missing", "", OSError),
        ("{d}/missing", "{d}/file", "", OSError),
        ("{d}/file", "", "", OSError),
        ("{d}/fifo", "{d}/file", "{d}/missing", OSError),
        ("{d}/fifo", "file:///dev/null/log", "", OSError),
        ("{d}/fifo", "binary://{d}/missing", "", OSError),
        ("{d}/fifo", "binary://{d}/file", "", OSError),
        ("{d}/fifo", "binary:///bin/false", "", OSError),
        ("{d}/fifo", "gopher:///x", "", Invalid),
    ],
)
def test_what_cannot_be_opened_leaves_nothing_open(
    bench: Run[None], stdin: str, stdout: str, stderr: str, error: type[Exception]
) -> None:
    async def work(b: Bench) -> None:
        b.fifo("fifo")
        (b.directory / "file").touch()
        with pytest.raises(error):
            await b.open(*(text.format(d=b.directory) for text in (stdin, stdout, stderr)))

    bench(work)


def test_cancelled_open_leaves_nothing_open(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        opening = asyncio.create_task(b.open(b.fifo("in"), b.fifo("out")))
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    bench(work)


def test_process_that_was_never_started_has_nothing_to_drain(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out)
        assert await stdio.drained(0)
        stdio.close()
        assert await read_to_end(client) == b""

    bench(work)


def test_hundred_processes_at_once_share_one_loop(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        async def one(number: int) -> None:
            client = b.reader(out := b.fifo(f"out{number}"))
            stdio = await b.open(stdout=out)
            await b.shell(stdio, f"head -c 100000 /dev/zero; echo {number}")
            assert await read_to_end(client) == bytes(100000) + f"{number}\n".encode()
            assert await stdio.drained(DEADLINE)

        await asyncio.gather(*map(one, range(100)))

    bench(work)
