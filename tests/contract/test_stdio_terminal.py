"""A process with a terminal, whose master comes through the console socket from a program that acts as the runtime."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from kybernate_shim.linux.children import Child
from kybernate_shim.task import stdio as stdio_module
from kybernate_shim.task.stdio import Stdio
from tests.contract.stdio_bench import (
    DEADLINE,
    Bench,
    Run,
    fixture_bench,
    inheritable,
    read_some,
    read_to_end,
    until,
    would_block,
)

__all__ = ["fixture_bench"]

# Makes a terminal, sends its master, and becomes the process
RUNTIME = """
import os, socket, sys
master, slave = os.openpty()
with socket.socket(socket.AF_UNIX) as console:
    console.connect(sys.argv[1])
    socket.send_fds(console, [b"/dev/ptmx"], [master])
os.close(master)
os.login_tty(slave)
os.execvp(sys.argv[2], sys.argv[2:])
"""


async def start(b: Bench, stdio: Stdio, *argv: str) -> Child:
    assert stdio.fds == {}
    child = b.children.spawn([sys.executable, "-c", RUNTIME, str(stdio.console_socket), *argv])
    await stdio.started()
    return child


async def start_shell(b: Bench, stdio: Stdio, script: str) -> Child:
    return await start(b, stdio, "/bin/sh", "-c", script)


def test_terminal_output_is_complete_when_the_process_has_ended(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out, terminal=True)
        await start_shell(b, stdio, "tty >/dev/null && seq 100000")
        assert await read_to_end(client) == b"".join(b"%d\r\n" % n for n in range(1, 100001))
        assert await stdio.drained(DEADLINE)

    bench(work)


def test_console_socket_is_private_and_gone_after_the_start(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out, terminal=True)
        assert stdio.console_socket is not None
        assert stat.S_IMODE(stdio.console_socket.parent.stat().st_mode) == 0o700
        before = inheritable()
        await start(b, stdio, "true")
        assert inheritable() == before, "the terminal would leak into every child"
        assert not stdio.console_socket.parent.exists()
        await read_to_end(client)

    bench(work)


def test_typed_text_reaches_the_process_and_its_echo_the_client(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out, terminal=True)
        await start_shell(b, stdio, "read line; echo got $line")
        typist = b.writer(stdin)
        os.write(typist, b"hello\n")
        assert await read_to_end(client) == b"hello\r\ngot hello\r\n"
        with pytest.raises(BrokenPipeError):  # immediately, not at Delete
            os.write(typist, b"nobody reads this")
        os.close(typist)

    bench(work)


def test_end_of_input_does_not_end_the_process(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        client = b.reader(out)
        stdio = await b.open(stdin, out, terminal=True)
        child = await start_shell(
            b, stdio, "trap 'echo hangup; exit' HUP; trap 'echo told; exit' USR1; echo ready; read line; echo end"
        )
        assert await read_some(client) == b"ready\r\n"
        os.close(b.writer(stdin))
        stdio.close_stdin()

        def nobody_reads() -> bool:
            try:
                os.close(b.writer(stdin))
            except OSError:
                return True
            return False

        await until(nobody_reads, "the input is closed")
        assert would_block(client)
        os.kill(child.pid, signal.SIGUSR1)
        assert await read_to_end(client) == b"told\r\n"

    bench(work)


def test_resize_counts_before_the_terminal_exists_and_after(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdin = b.fifo("in")
        stdio = await b.open(stdin, out, terminal=True)
        stdio.resize(100, 30)
        await start_shell(
            b, stdio, "stty -echo; echo ready; read x; stty size; trap 'stty size; exit' WINCH; echo; read x"
        )
        assert await read_some(client) == b"ready\r\n"
        typist = b.writer(stdin)
        os.write(typist, b"\n")
        seen = b""
        while not seen.endswith(b"\r\n\r\n"):
            seen += await read_some(client)
        assert seen == b"30 100\r\n\r\n"
        stdio.resize(1 << 20, 25)
        assert await read_to_end(client) == b"25 65535\r\n"
        stdio.resize(80, 25)
        os.close(typist)

    bench(work)


def test_client_of_a_terminal_may_leave_and_come_back(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdin, out = b.fifo("in"), b.fifo("out")
        os.close(b.reader(out))
        opening = asyncio.create_task(b.open(stdin, out, terminal=True))
        await asyncio.sleep(0)
        client = b.reader(out)
        stdio = await opening
        await start_shell(b, stdio, "stty -echo; echo ready; read x; echo $x; read x; echo $x")
        assert await read_some(client) == b"ready\r\n"
        os.close(client)
        typist = b.writer(stdin)
        os.write(typist, b"alone\n")
        os.close(typist)
        client = b.reader(out)
        assert await read_some(client) == b"alone\r\n"
        typist = b.writer(stdin)
        os.write(typist, b"again\n")
        os.close(typist)
        assert await read_to_end(client) == b"again\r\n"

    bench(work)


def test_terminal_without_a_client_does_not_stop_the_process(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(terminal=True)
        child = await start_shell(b, stdio, "seq 100000")
        assert (await child.exited).status == 0
        assert await stdio.drained(DEADLINE)

    bench(work)


def test_terminal_output_goes_into_a_log_file(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=f"file://{b.directory}/log", terminal=True)
        await start_shell(b, stdio, "echo out; echo err >&2")
        assert await stdio.drained(DEADLINE)
        assert (b.directory / "log").read_bytes() == b"out\r\nerr\r\n"

    bench(work)


def test_background_process_keeps_the_terminal_open_until_close(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(stdout=out, terminal=True)
        child = await start_shell(b, stdio, "trap '' HUP; sleep 1000 & echo over")
        await asyncio.shield(child.exited)
        assert not await stdio.drained(0.1)
        stdio.close()
        assert await read_to_end(client) == b"over\r\n"
        os.killpg(child.pid, signal.SIGKILL)

    bench(work)


SENDS_NOTHING = "import sys"
SENDS_NO_DESCRIPTOR = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b'x')"
SENDS_A_FILE = (
    "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
    "socket.send_fds(s, [b'x'], [os.open('/dev/null', os.O_RDWR)])"
)
HANGS_UP = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"


@pytest.mark.parametrize(
    ("runtime", "error"),
    [
        (SENDS_NOTHING, "sent no terminal"),
        (SENDS_NO_DESCRIPTOR, "carried no descriptor"),
        (SENDS_A_FILE, "is not a terminal"),
        (HANGS_UP, "carried no descriptor"),
    ],
)
def test_runtime_that_sends_no_terminal_fails_the_start_and_leaves_nothing(
    bench: Run[None], monkeypatch: pytest.MonkeyPatch, runtime: str, error: str
) -> None:
    monkeypatch.setattr(stdio_module, "CONSOLE_SECONDS", 2.0)

    async def work(b: Bench) -> None:
        client = b.reader(out := b.fifo("out"))
        stdio = await b.open(b.fifo("in"), out, terminal=True)
        b.children.spawn([sys.executable, "-c", runtime, str(stdio.console_socket)])
        with pytest.raises(OSError, match=error):
            await stdio.started()
        assert await read_to_end(client) == b"", "the failure released everything"

    bench(work)


def test_console_socket_with_too_long_a_path_is_refused(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        with pytest.raises(OSError, match="longer than 107 bytes"):
            await b.open(terminal=True, runtime_dir=Path("/run") / ("x" * 100))

    bench(work)
