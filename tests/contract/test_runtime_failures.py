"""Runtime programs that are missing, fail, crash or hang: real processes, and what is said of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from kybernate_shim.config import Deadlines
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.runtime import Runtime, RuntimeFailed, RuntimeTimedOut, runtime_environment
from tests.contract.runtime_bench import alive, daemon, until, until_ended, write_program

T = TypeVar("T")


def with_runtime(binary: Path, work: Callable[[Runtime], Awaitable[T]], **deadlines: float) -> T:
    async def main() -> T:
        async with daemon() as children:
            cli = Cli(binary, binary.parent / "root", binary.parent / "log.json")
            return await asyncio.wait_for(work(Runtime(cli, children, os.environ, Deadlines(**deadlines))), 20)

    return asyncio.run(main())


def failure(binary: Path, **deadlines: float) -> RuntimeFailed:
    with pytest.raises(RuntimeFailed) as caught:
        with_runtime(binary, lambda runtime: runtime.start("c"), **deadlines)
    return caught.value


def test_program_that_vanished_is_named(tmp_path: Path) -> None:
    error = failure(tmp_path / "runc")
    assert str(error) == f"OCI runtime start failed: {tmp_path}/runc cannot be executed: No such file or directory"


def test_program_that_is_no_program_is_named(tmp_path: Path) -> None:
    binary = write_program(tmp_path / "runc", "")
    binary.write_bytes(b"\x7fELF, cut short")
    assert str(failure(binary)).endswith(f"{binary} cannot be executed: Exec format error")


def test_directory_that_vanished_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with daemon() as children:
            await Runtime(
                Cli(Path("/bin/true"), tmp_path, None), children, os.environ, directory=tmp_path / "gone"
            ).start("c")

    with pytest.raises(RuntimeFailed, match=f"cannot be executed in {tmp_path}/gone: No such file or directory"):
        asyncio.run(main())


def test_program_that_fails_without_a_log_is_quoted_from_stderr(tmp_path: Path) -> None:
    binary = write_program(tmp_path / "runc", "echo cannot find libseccomp >&2; exit 127")
    error = failure(binary)
    assert error.status == 127
    assert str(error).startswith(f"OCI runtime start failed: `{binary} --root ")
    assert str(error).endswith("start c` ended with status 127: cannot find libseccomp")


def test_program_that_fails_with_a_log_is_quoted_from_there(tmp_path: Path) -> None:
    script = """echo '{"level":"error","msg":"no space left"}' >>"$4"; echo noise >&2; exit 1"""
    assert str(failure(write_program(tmp_path / "runc", script))) == "OCI runtime start failed: no space left"


def test_program_that_crashes_is_told_with_its_signal(tmp_path: Path) -> None:
    error = failure(write_program(tmp_path / "runc", "kill -SEGV $$"))
    assert str(error).endswith("start c` ended with status 139 (SIGSEGV) and wrote nothing")


def test_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    binary = write_program(tmp_path / "runc", f"sleep 1000 & echo $$ $! >{pids}; wait")
    begin = time.monotonic()
    error = failure(binary, start=0.5)
    assert isinstance(error, RuntimeTimedOut)
    assert str(error).startswith(f"OCI runtime start failed: {binary} ")
    assert str(error).endswith("start c: killed, because it did not end within 0.5 s")
    assert time.monotonic() - begin < 10
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


def test_cancelled_call_leaves_no_program_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    binary = write_program(tmp_path / "runc", f"echo $$ >{pids}.new; mv {pids}.new {pids}; exec sleep 1000")

    async def written() -> bool:
        return pids.exists()

    async def work(runtime: Runtime) -> None:
        call = asyncio.create_task(runtime.start("c"))
        await until(written, "the program runs")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_ended(int(pids.read_text()))

    with_runtime(binary, work)


def test_background_process_that_keeps_the_output_open_holds_nobody_up(tmp_path: Path) -> None:
    binary = write_program(tmp_path / "runc", "sleep 3 & exit 0")
    begin = time.monotonic()
    with_runtime(binary, lambda runtime: runtime.start("c"))
    assert time.monotonic() - begin < 2


def test_systemds_socket_does_not_reach_the_runtime(tmp_path: Path) -> None:
    binary = write_program(tmp_path / "runc", f'echo "$NOTIFY_SOCKET$MARK" >{tmp_path}/seen')

    async def main() -> None:
        env = runtime_environment({**os.environ, "NOTIFY_SOCKET": "/run/notify", "MARK": "mark"})
        async with daemon() as children:
            await Runtime(Cli(binary, tmp_path, Bundle(tmp_path).log), children, env).start("c")

    asyncio.run(main())
    assert (tmp_path / "seen").read_text() == "mark\n"
