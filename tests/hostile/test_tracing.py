"""Processes that change what a tracer is about to have them do. None may get past its own seccomp filter by that."""

from __future__ import annotations

import errno
import platform
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kybernate_shim.linux.ptrace.followed import FollowedTracee
from kybernate_shim.linux.ptrace.seized import SeizedProcess, own_abi
from kybernate_shim.linux.ptrace.tracee import InjectionFailed

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacker is written in x86-64 machine code"),
]
SOURCE = Path(__file__).parents[1] / "fakes" / "rewrites_code.c"
CAUGHT = 5  # calls that meet the other instruction, of some 10 to 200 that are made for one
SLOW_SECONDS = 0.05  # for a call that ends by its deadline
PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewrites-code") / "rewrites_code"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", path, SOURCE], check=True)
    return path


class Rewritten:
    """A running program of that kind."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        assert self.answer() == b"R"

    def lives_on_under_its_filter(self) -> bool:
        self.ask()
        return self.answer() == b"R"

    def ask(self) -> None:
        """Have it try the forbidden call once."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"?")
        self._process.stdin.flush()

    def answer(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.read(1)


@contextmanager
def rewritten(*argv: str | Path) -> Iterator[Rewritten]:
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Rewritten(process)
        finally:
            process.kill()


def inject(pid: int, caught: int, seconds: float = 10.0) -> tuple[set[int], set[str]]:
    """Have the process ask for its pid until so many calls have failed; return results and names of failures."""
    results, failures = set(), []
    until = time.monotonic() + PATIENCE_SECONDS
    with SeizedProcess(pid) as held:
        held._seconds = seconds
        while len(failures) < caught or not results:
            assert time.monotonic() < until, f"results {results}, failures {failures}"
            held._instruction = 0  # to be found again, or it stays at one that the process does not change
            try:
                results.add(held.call(held.abi.getpid, 11, 12, 13))
            except InjectionFailed as error:
                failures.append(type(error).__name__)
    return results, set(failures)


@pytest.mark.parametrize("filter_kills", [False, True], ids=["filter-answers", "filter-kills"])
@pytest.mark.parametrize("attack", ["mkdir", "mkdir32", "arguments", "place", "fault"])
def test_other_call_is_taken_back(program: Path, tmp_path: Path, attack: str, filter_kills: bool) -> None:
    forbidden = tmp_path / "forbidden"
    with rewritten(program, attack, forbidden, *["kills"] * filter_kills) as process:
        results, failures = inject(process.pid, CAUGHT)
        assert not forbidden.exists()
        assert failures == {"InjectionFailed"}
        assert results == {process.pid}
        assert process.lives_on_under_its_filter()
    assert not forbidden.exists()


def test_code_that_never_calls_costs_the_deadline(program: Path, tmp_path: Path) -> None:
    forbidden = tmp_path / "forbidden"
    with rewritten(program, "loop", forbidden) as process:
        results, failures = inject(process.pid, 2, SLOW_SECONDS)
        assert failures == {"TargetUnresponsive"}
        assert results == {process.pid}
        assert process.lives_on_under_its_filter()
    assert not forbidden.exists()


def test_filter_holds_while_the_thread_is_held(program: Path, tmp_path: Path) -> None:
    """It is suspended for the injected call alone, not for what the thread itself calls before it is let go."""
    forbidden = tmp_path / "forbidden"

    def follow(process: Rewritten) -> list[int]:
        tracee = FollowedTracee(process.pid, own_abi(), time.monotonic() + PATIENCE_SECONDS)
        reach_call(tracee)  # the read in which it waits
        process.ask()
        reach_call(tracee)
        returned = [tracee.call_here(own_abi().getpid, (), time.monotonic() + PATIENCE_SECONDS)]
        for _ in range(2):
            reach_call(tracee)
        returned.append(tracee.returned())  # its own mkdir
        tracee.detach()
        return returned

    with rewritten(program, "place", forbidden) as process, ThreadPoolExecutor(1) as tracer:
        assert tracer.submit(follow, process).result() == [process.pid, -errno.EPERM]
        assert process.answer() == b"R"
    assert not forbidden.exists()


def reach_call(tracee: FollowedTracee) -> None:
    tracee.go_to_call()
    while not tracee.at_call():
        time.sleep(0.001)
