"""Threads and processes with what CRIU would lose or refuse are named before a dump."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kybernate_shim.checkpoint import own_state
from kybernate_shim.checkpoint.own_state import (
    listed,
    namespace_nested,
    nested_namespaces,
    own_thread_state,
    thread_state_not_saved,
)
from kybernate_shim.linux.libc import unshare
from kybernate_shim.linux.process import title_of

ME = os.getpid()
FS, FILES = 0x200, 0x400


@contextmanager
def parted(flags: int) -> Iterator[int]:
    """Have a thread that no longer shares something with its process; yield its number."""
    begun, end = threading.Event(), threading.Event()
    number: list[int] = []

    def work() -> None:
        if flags:
            unshare(flags)
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


def test_threads_of_an_ordinary_process_share_all() -> None:
    with parted(0) as number:
        assert not [text for text in own_thread_state([ME]) if f"thread {number} " in text]


@pytest.mark.parametrize(
    ("flags", "what"), [(FS, "a working directory, root and umask"), (FILES, "a table of descriptors")]
)
def test_thread_with_something_of_its_own_is_named(flags: int, what: str) -> None:
    with parted(flags) as number:
        assert f"thread {number} of {title_of(ME)} has {what} of its own" in own_thread_state([ME])


@pytest.mark.parametrize(("kind", "word"), [("net", "network"), ("mnt", "mount"), ("pid_for_children", "pid")])
def test_thread_in_another_namespace_is_named(monkeypatch: pytest.MonkeyPatch, kind: str, word: str) -> None:
    with parted(0) as number:
        monkeypatch.setattr(
            own_state, "_namespace", lambda tid, one: "other" if (tid, one) == (number, kind) else "own"
        )
        assert f"thread {number} of {title_of(ME)} has a {word} namespace of its own" in own_thread_state([ME])


def test_process_in_another_namespace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_state, "_namespace", lambda tid, one: "own" if tid == 1 or one != "user" else "other")
    assert nested_namespaces([1, ME], 1) == [f"{title_of(ME)} has a user namespace of its own"]


def test_processes_that_have_ended_have_nothing() -> None:
    gone = (1 << 22) + 1
    assert (nested_namespaces([ME, gone], ME), own_thread_state([gone])) == ([], [])


def test_zombies_have_given_up_all() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (nested_namespaces([process.pid], ME), own_thread_state([process.pid])) == ([], [])


def test_of_many_some_are_shown() -> None:
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and there are 2 more"


def test_refusals_say_what_to_do_and_what_goes_on() -> None:
    for refusal in (namespace_nested, thread_state_not_saved):
        text = str(refusal("web", ["it has one"]))
        assert text.startswith("it has one: ")
        assert "container web continues as before" in text
