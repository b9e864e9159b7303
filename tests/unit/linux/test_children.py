"""Children: spawning, reaping, early exits. Real processes, no waiting but for their end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from kybernate_shim.linux.children import Child, Children, Exit, ProgramTimedOut

T = TypeVar("T")
SH = "/bin/sh"


def with_children(work: Callable[[Children], Awaitable[T]]) -> T:
    async def main() -> T:
        children = Children()
        children.attach(asyncio.get_running_loop())
        return await asyncio.wait_for(work(children), 20)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_exit_status_is_the_code_or_128_and_the_signal(script: str, status: int) -> None:
    assert with_children(lambda children: children.run([SH, "-c", script])).status == status


def test_both_outputs_are_kept_apart() -> None:
    finished = with_children(lambda children: children.run([SH, "-c", "echo out; echo err >&2"]))
    assert (finished.stdout, finished.stderr) == ("out\n", "err\n")


def test_only_the_tail_of_a_long_output_is_kept() -> None:
    script = "import sys; sys.stdout.write('x' * 300_000 + 'end')"
    out = with_children(lambda children: children.run([sys.executable, "-c", script])).stdout
    assert len(out) == 64 * 1024
    assert out.endswith("xend")


def test_stdin_is_the_given_bytes_then_end_of_file() -> None:
    assert with_children(lambda children: children.run(["cat"], stdin=b"a\0b")).stdout == "a\0b"


def test_copy_ends_with_the_status_of_its_work() -> None:
    async def work(children: Children) -> list[int]:
        copies = [children.fork(lambda: 0), children.fork(lambda: 7), children.fork(lambda: 1 // 0)]
        return [(await copy.exited).status for copy in copies]

    assert with_children(work) == [0, 7, 1]


def test_copy_leads_a_group_and_has_the_usual_signals() -> None:
    def look() -> int:
        usual = all(signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGCHLD, signal.SIGTERM))
        return 0 if usual and os.getpgrp() == os.getpid() and not signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 1

    async def work(children: Children) -> int:
        return (await children.fork(look).exited).status

    assert with_children(work) == 0


def test_copy_can_be_ended_from_the_moment_it_exists() -> None:
    async def work(children: Children) -> int:
        copy = children.fork(lambda: signal.pause() or 0)
        await copy.end()
        return (await copy.exited).status

    assert [with_children(work) for _ in range(20)] == [137] * 20


def test_child_inherits_no_descriptor_but_those_named() -> None:
    async def work(children: Children) -> str:
        secret = os.open("/dev/null", os.O_RDONLY)
        os.set_inheritable(secret, False)
        read, write = os.pipe()
        try:
            return (await children.run(["ls", "/proc/self/fd"], fds={5: write})).stdout
        finally:
            for fd in (secret, read, write):
                os.close(fd)

    # ls itself opens the directory that it lists; a test runner's own parents may have left it inheritable ones
    ours = {fd for fd in (int(path.name) for path in Path("/proc/self/fd").iterdir()) if _inheritable(fd)}
    assert set(map(int, with_children(work).split())) - ours <= {0, 1, 2, 3, 4, 5}


def _inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def test_descriptors_may_change_places() -> None:
    async def work(children: Children) -> tuple[bytes, bytes]:
        (read_a, write_a), (read_b, write_b) = os.pipe(), os.pipe()
        script = f"import os; os.write({write_b}, b'via b'); os.write({write_a}, b'via a')"
        await children.run([sys.executable, "-c", script], fds={write_b: write_a, write_a: write_b})
        try:
            return os.read(read_a, 9), os.read(read_b, 9)
        finally:
            for fd in (read_a, write_a, read_b, write_b):
                os.close(fd)

    assert with_children(work) == (b"via b", b"via a")


def test_program_is_looked_up_in_the_childs_own_path(tmp_path: Path) -> None:
    program = tmp_path / "hello"
    program.write_text("#!/bin/sh\necho from here\n")
    program.chmod(0o755)
    finished = with_children(lambda children: children.run(["hello"], env={"PATH": str(tmp_path)}))
    assert finished.stdout == "from here\n"


def test_missing_program_is_named_with_the_path_that_was_searched() -> None:
    with pytest.raises(FileNotFoundError, match=r"no-such-program.*PATH=/nowhere"):
        with_children(lambda children: children.run(["no-such-program"], env={"PATH": "/nowhere"}))


def test_program_that_the_kernel_holds_does_not_hold_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a filesystem whose server does not answer: SIGKILL does not end it."""
    monkeypatch.setattr(Child.end, "__kwdefaults__", {"seconds": 0.01})
    kill, killed = os.killpg, []

    async def work(children: Children) -> None:
        monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
        with pytest.raises(ProgramTimedOut, match="it has not ended yet: the kernel holds it"):
            await children.run(["sleep", "60"], timeout=0.01)

    try:
        with_children(work)
    finally:
        kill(killed[0], signal.SIGKILL)
        os.waitpid(killed[0], 0)


def test_program_beyond_its_deadline_is_killed_with_its_children() -> None:
    async def work(children: Children) -> None:
        with pytest.raises(ProgramTimedOut, match=r"sleep 60"):
            await children.run([SH, "-c", "sleep 60 & sleep 60"], timeout=0.1)

    with_children(work)


def test_cancelled_caller_leaves_no_program_behind() -> None:
    async def work(children: Children) -> None:
        before = {child.pid for child in psutil.Process().children()}
        waiter = asyncio.create_task(children.run(["sleep", "60"]))
        await asyncio.sleep(0)
        (pid,) = {child.pid for child in psutil.Process().children()} - before
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        while psutil.pid_exists(pid):  # noqa: ASYNC110  # the kernel's; `with_children` has a deadline
            await asyncio.sleep(0.001)

    with_children(work)


def test_exit_of_an_unknown_process_reaches_every_open_collector() -> None:
    async def work(children: Children) -> tuple[Exit | None, Exit | None]:
        with children.early_exits() as first, children.early_exits() as second:
            pid = os.posix_spawn(SH, [SH, "-c", "exit 3"], os.environ)  # noqa: ASYNC221  # returns immediately
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # the process has ended or is about to
            children.reap()
            return first.take(pid), second.take(pid)

    first, second = with_children(work)
    assert first is not None
    assert first.status == 3
    assert first == second


def test_claimed_process_is_reported_once() -> None:
    async def work(children: Children) -> list[int]:
        seen: asyncio.Queue[Exit] = asyncio.Queue()
        pid = os.posix_spawn(SH, [SH, "-c", "read line; exit 4"], os.environ, file_actions=[  # noqa: ASYNC221
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        ])  # fmt: skip
        children.claim(pid, seen.put_nowait)
        first = await seen.get()
        children.reap()
        return [first.status, seen.qsize()]

    assert with_children(work) == [4, 0]


def test_child_blocks_no_signal_and_leads_its_own_session() -> None:
    script = (
        "import os,re;s=open('/proc/self/status').read();"
        "print(os.getsid(0)==os.getpid(), int(re.search('SigBlk:\\s*(\\w+)',s)[1],16))"
    )
    assert with_children(lambda children: children.run([sys.executable, "-c", script])).stdout == "True 0\n"


def test_collectors_side_by_side_each_close_their_own() -> None:
    async def work(children: Children) -> Exit | None:
        with children.early_exits() as outer:
            with children.early_exits():
                pass
            pid = os.posix_spawn(SH, [SH, "-c", "exit 3"], os.environ)  # noqa: ASYNC221  # returns immediately
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # the process is about to end
            children.reap()
            return outer.take(pid)

    ended = with_children(work)
    assert ended is not None
    assert ended.status == 3


def test_child_with_an_umask_of_its_own_leaves_ours(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        script = f"umask; touch {tmp_path}/file"
        assert with_children(lambda children: children.run([SH, "-c", script], umask=0o077)).stdout == "0077\n"
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
        assert with_children(lambda children: children.run([SH, "-c", "umask"])).stdout == "0022\n"
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_program_that_is_missing_is_an_error_with_an_umask_as_well() -> None:
    with pytest.raises(FileNotFoundError):
        with_children(lambda children: children.run(["/no/such/program"], umask=0o077))


@pytest.mark.parametrize("umask", [None, 0o077])
def test_child_with_a_directory_of_its_own_leaves_ours(tmp_path: Path, umask: int | None) -> None:
    before = Path.cwd()
    for program in ([SH, "-c", "pwd -P"], ["/no/such/program"]):
        try:
            done = with_children(lambda children, argv=program: children.run(argv, cwd=tmp_path, umask=umask))
            assert done.stdout == f"{tmp_path.resolve()}\n"
        except FileNotFoundError:
            assert program[0] != SH
        assert Path.cwd() == before


def test_directory_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "gone")):
        with_children(lambda children: children.run([SH, "-c", "true"], cwd=tmp_path / "gone"))


def test_handler_that_fails_keeps_no_other_exit_from_its_own() -> None:
    seen: list[int] = []

    def fail(exit_: Exit) -> None:
        seen.append(exit_.status)
        raise OSError("no descriptor is left")

    pids = [os.posix_spawn(SH, ["sh", "-c", "exit 3"], {}) for _ in range(2)]
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(-1))
        children = Children()
        for pid in pids:
            children.claim(pid, fail)
        children.reap()

    asyncio.run(work())
    assert seen == [3, -1, 3, -1]
