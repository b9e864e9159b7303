"""Logger programs named by `binary://`: real ones, with the faults that such programs have."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from kybernate_shim.task import logger as logger_module
from kybernate_shim.task.destination import Destination
from kybernate_shim.task.logger import Logger
from tests.contract.stdio_bench import DEADLINE, Bench, Run, fixture_bench, inheritable, until
from tests.contract.test_stdio_terminal import start_shell as start_in_terminal

__all__ = ["fixture_bench"]

# Writes what it was given, says that it is ready, then keeps both outputs, apart from each other
OTHERS: set[int] = set()  # children of this process that are not of the test
KEEPS = """
import json, os, sys, time
given = {"argv": sys.argv[1:], "env": dict(os.environ), "fds": os.listdir("/proc/self/fd")}
here = os.path.dirname(sys.argv[0])
open(here + "/given", "w").write(json.dumps(given))
os.close(5)
for fd, name in ((3, "out"), (4, "err")):
    with open(here + "/" + name, "wb") as log:
        while block := os.read(fd, 65536):
            log.write(block)
time.sleep(0.1)
open(here + "/done", "w").close()
"""


def program(directory: Path, source: str) -> str:
    path = directory / "my logger"
    path.write_text(f"#!{sys.executable} -IS\n{source}")
    path.chmod(0o755)
    return f"binary://{directory}/my%20logger"


def test_logger_gets_arguments_environment_and_both_outputs(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        uri = program(b.directory, KEEPS)
        inherited = inheritable()
        stdio = await b.open(stdout=uri + "?id=a%20b&flag&id=c", stderr=uri)
        assert set(stdio.fds) == {1, 2}
        child = await b.shell(stdio, "echo out; echo err >&2; exec >&- 2>&-; sleep 0.1")
        assert await stdio.drained(DEADLINE)
        assert (b.directory / "done").exists(), "drained means that the logger has ended"
        assert (b.directory / "out").read_bytes() == b"out\n"
        assert (b.directory / "err").read_bytes() == b"err\n"
        given = json.loads((b.directory / "given").read_text())
        given["env"].pop("LC_CTYPE", None)  # set by Python itself (PEP 538)
        # less the one that listed the directory, and what the program that runs the tests lets every child inherit
        given["fds"] = [fd for fd in sorted(map(int, given["fds"])) if fd != 6 and fd not in inherited - {0, 1, 2}]
        assert given == {
            "argv": ["id", "a b", "flag", ""],
            "env": {"CONTAINER_ID": "app", "CONTAINER_NAMESPACE": "k8s.io"},
            "fds": [0, 1, 2, 3, 4, 5],
        }
        assert (await child.exited).status == 0
        stdio.close()
        assert b.logged.entries == []

    bench(work)


def test_large_output_reaches_the_logger_whole(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=program(b.directory, KEEPS))
        await b.start(stdio, "head", "-c", "10000000", "/dev/zero")
        assert await stdio.drained(DEADLINE)
        assert (b.directory / "out").stat().st_size == 10_000_000

    bench(work)


def test_terminal_output_reaches_the_logger(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=program(b.directory, KEEPS), terminal=True)
        await start_in_terminal(b, stdio, "echo out; echo err >&2")
        assert await stdio.drained(DEADLINE)
        assert (b.directory / "out").read_bytes() == b"out\r\nerr\r\n"

    bench(work)


def test_logger_of_a_terminal_that_dies_does_not_stop_the_process(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=program(b.directory, "import os; os.close(5); os.read(3, 1)"), terminal=True)
        child = await start_in_terminal(b, stdio, "seq 100000")
        assert (await child.exited).status == 0
        assert await stdio.drained(DEADLINE)
        assert b.logged.named("output.refused")
        assert b.logged.named("output.lost")

    bench(work)


def test_logger_that_writes_a_byte_is_ready(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=program(b.directory, "import os; os.write(5, b'.'); os.read(3, 1)"))
        await b.shell(stdio, "echo")
        assert await stdio.drained(DEADLINE)

    bench(work)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise SystemExit(3)", "ended before it was ready, status 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended before it was ready, status 137"),
        ("import time; time.sleep(1000)", "not ready after 0.5 s; it was killed"),
    ],
)
def test_logger_that_does_not_become_ready_is_gone(bench: Run[None], source: str, error: str) -> None:
    async def work(b: Bench) -> None:
        program(b.directory, source)
        with pytest.raises(OSError, match=error):
            await Logger.start(
                Destination("binary", str(b.directory / "my logger")),
                children=b.children,
                container="app",
                namespace="k8s.io",
                log=b.logged.log,
                timeout=0.5 if "sleep" in source else DEADLINE,
            )
        await until(has_no_children, "the logger is dead and reaped")

    bench(work)


@pytest.fixture(autouse=True)
def _others() -> None:
    """Note what earlier tests have left behind, such as multiprocessing's tracker of resources."""
    OTHERS.clear()
    OTHERS.update(child.pid for child in psutil.Process().children())


def has_no_children() -> bool:
    """Return whether every child of the test, dead ones included, is gone."""
    return {child.pid for child in psutil.Process().children()} <= OTHERS


def test_logger_that_goes_on_after_the_end_is_asked_to_stop(bench: Run[None]) -> None:
    source = """
import os, signal, time
def stop(*_):
    open(os.path.dirname(__file__) + "/asked", "w").close()
    raise SystemExit
signal.signal(signal.SIGTERM, stop)
os.close(5)
while True: time.sleep(1)
"""

    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=program(b.directory, source))
        await b.shell(stdio, "echo")
        assert not await stdio.drained(0.1)
        stdio.close()
        await until(has_no_children, "the logger is dead and reaped")
        assert (b.directory / "asked").exists()

    bench(work)


def test_logger_that_ignores_the_request_is_killed(bench: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_module, "TERM_SECONDS", 0.3)
    source = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(5); time.sleep(1000)"

    async def work(b: Bench) -> None:
        stdio = await b.open(stdout=program(b.directory, source))
        await b.shell(stdio, "echo")
        stdio.close()
        await asyncio.sleep(0.1)
        assert not has_no_children(), "it was killed without notice"
        await until(has_no_children, "the logger is dead and reaped")

    bench(work)


def test_logger_that_dies_while_the_process_runs_is_in_the_log(bench: Run[None]) -> None:
    async def work(b: Bench) -> None:
        stdio = await b.open(
            stdout=program(b.directory, "import os; os.close(5); os.read(3, 1); os.kill(os.getpid(), 9)")
        )
        child = await b.shell(stdio, "echo; exec cat /dev/zero")
        assert (await child.exited).status == 128 + signal.SIGPIPE
        await until(lambda: bool(b.logged.named("logger.exited")), "the logger's death is in the log")
        assert b.logged.named("logger.exited")[0]["status"] == 137

    bench(work)
