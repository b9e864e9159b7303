"""A process's input from a FIFO: it ends when CloseIO was called and the last client has gone, not before."""

from __future__ import annotations

import hashlib
import os
import sys

import pytest

from tests.contract.stdio_bench import Bench, Run, fixture_bench, read_some, read_to_end, until, would_block

__all__ = ["fixture_bench"]

CHECKSUMMED = "import sys, hashlib; d = sys.stdin.buffer.read(); print(len(d), hashlib.sha256(d).hexdigest())"


def test_ten_megabytes_of_input_arrive_unchanged(bench: Run[None]) -> None:
    data = os.urandom(1 << 20) * 10

    async def work(b: Bench) -> None:
        (b.directory / "data").write_bytes(data)
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out)
        await b.start(stdio, sys.executable, "-c", CHECKSUMMED)
        typist = b.children.spawn(["/bin/sh", "-c", f"cat {b.directory}/data > {stdin}"])
        await typist.exited
        assert would_block(client), "the client's end of the FIFO is not the end of the input"
        stdio.close_stdin()
        assert await read_to_end(client) == f"{len(data)} {hashlib.sha256(data).hexdigest()}\n".encode()

    bench(work)


@pytest.mark.parametrize("client_writes", [b"", b"typed before"])
def test_close_io_before_the_start_is_remembered(bench: Run[None], client_writes: bytes) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out)
        typist = b.writer(stdin)
        os.write(typist, client_writes)
        stdio.close_stdin()
        stdio.close_stdin()
        os.close(typist)
        await b.start(stdio, "cat")
        assert await read_to_end(client) == client_writes

    bench(work)


def test_close_io_leaves_the_input_open_while_a_client_has_it(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out)
        await b.start(stdio, "cat")
        typist = b.writer(stdin)
        stdio.close_stdin()
        os.write(typist, b"still typing")
        assert await read_some(client) == b"still typing"
        os.close(typist)
        assert await read_to_end(client) == b""

    bench(work)


def test_process_that_closes_its_input_breaks_the_clients_pipe(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out)
        child = await b.shell(stdio, "exec 0<&-; echo closed; exec sleep 1000")
        assert await read_some(client) == b"closed\n"
        typist = b.writer(stdin)

        def is_broken() -> bool:
            try:
                os.write(typist, b"x")
            except BrokenPipeError:
                return True
            return False

        await until(is_broken, "the client's pipe is broken")
        os.close(typist)
        child.kill()
        assert await read_to_end(client) == b""

    bench(work)
