"""What threads have chosen: found where it differs from what they inherit, and set again by their numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux import thread_settings
from kybernate_shim.linux.libc import syscall
from kybernate_shim.linux.thread_settings import (
    MOST_CPUS,
    InheritedSettings,
    ThreadSettings,
    chosen,
    cpu_list,
    cpu_set,
    put_back,
)

ME = os.getpid()
BEST_EFFORT_6 = 2 << 13 | 6


@contextmanager
def thread(begin: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Have a thread that does something and waits; yield its number."""
    begun, end = threading.Event(), threading.Event()
    number: list[int] = []

    def work() -> None:
        begin()
        number.append(threading.get_native_id())
        begun.set()
        end.wait()

    one = threading.Thread(target=work)
    one.start()
    try:
        begun.wait()
        yield number[0]
    finally:
        end.set()
        one.join()


def set_io_priority() -> None:
    syscall(thread_settings._IOPRIO[os.uname().machine][1], 1, 0, BEST_EFFORT_6, subject="this thread")


@pytest.fixture(autouse=True)
def default_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other threads, only a privileged process may see it: the lab's tests do."""
    monkeypatch.setattr(thread_settings, "_timer_slack", lambda thread: 50000)


@given(st.sets(st.integers(0, MOST_CPUS - 1), max_size=40))
def test_cpus_are_written_as_they_are_read(cpus: set[int]) -> None:
    assert cpu_set(cpu_list(cpus)) == cpus


def test_cpus_have_the_kernels_form() -> None:
    assert (cpu_list({0, 1, 2, 3, 8}), cpu_list(()), cpu_set("")) == ("0-3,8", "", set())


@pytest.mark.parametrize("text", ["3-1", "1,0", "x", "1-", "0-99999", "1,,2", " 1", "99999999999", "0-5,3"])
def test_other_texts_are_no_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of CPUs"):
        cpu_set(text)


def test_only_what_a_thread_has_chosen_is_found() -> None:
    with thread() as ordinary, thread(set_io_priority) as odd:
        found = {one.tid: one for one in chosen([ME], ME)}
        assert found[odd] == ThreadSettings(ME, odd, io_priority=BEST_EFFORT_6)
        assert ordinary not in found


def test_processes_that_have_ended_have_chosen_nothing() -> None:
    assert chosen([(1 << 22) + 1], ME) == ()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is all that there is to choose")
def test_chosen_cpus_are_found_and_set() -> None:
    last = max(os.sched_getaffinity(0))
    with thread(lambda: os.sched_setaffinity(0, {last})) as odd, thread() as other:
        (found,) = (one for one in chosen([ME], ME) if one.tid == odd)
        assert found.cpus == str(last)
        assert put_back(ME, [ThreadSettings(ME, other, cpus=found.cpus)]) == []
        assert os.sched_getaffinity(other) == {last}


def test_all_cpus_of_the_container_are_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_settings, "cpus_of_container", lambda pid: {0, 1, 2, 3})
    assert InheritedSettings(ME).cpus == (os.sched_getaffinity(0), {0, 1, 2, 3})


def test_io_priority_and_core_filter_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(thread_settings, "_write", lambda path, text: written.append((path, text)))
    with thread() as one:
        settings = ThreadSettings(ME, one, timer_slack=777, io_priority=BEST_EFFORT_6, core_filter=7)
        assert put_back(ME, [settings]) == []
        assert thread_settings._io_priority(one) == BEST_EFFORT_6
        assert written == [(f"/proc/{one}/timerslack_ns", "777"), (f"/proc/{one}/coredump_filter", "0x7")]


def test_what_is_different_is_said() -> None:
    absent, nowhere = ThreadSettings(ME, 1, cpus="0"), str(MOST_CPUS - 1)
    with thread() as one:
        differences = put_back(ME, [absent, ThreadSettings(ME, one, cpus=nowhere)])
    assert differences[0] == f"thread 1 of process {ME} was not restored"
    assert differences[1].startswith(f"thread {one} of process {ME}: ran on the CPUs {nowhere} only, and may use ")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="no part of one CPU can be missing")
def test_cpus_that_are_missing_here_are_left_out() -> None:
    last = max(os.sched_getaffinity(0))
    with thread() as one:
        (text,) = put_back(ME, [ThreadSettings(ME, one, cpus=f"{last},{MOST_CPUS - 1}")])
        assert text.endswith(f"of which it may use {last}")


def test_oom_score_of_zero_is_kept_where_the_shim_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU leaves a process whose score was 0 at what it inherits, which spares it longer than others."""
    scores = {ME: -998}
    monkeypatch.setattr(thread_settings, "oom_score_adj", lambda pid: scores[pid])
    usual = InheritedSettings(ME)
    scores[ME] = 0
    found = {one.tid: one.oom_zero for one in chosen_by(usual)}
    assert found[ME]
    assert sum(found.values()) == 1


def chosen_by(usual: InheritedSettings) -> list[ThreadSettings]:
    return list(thread_settings._of_process(ME, usual))
