"""What is found before a dump, on a process of this machine."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kybernate_shim.checkpoint import undumpable
from kybernate_shim.checkpoint.undumpable import look, not_dumpable
from kybernate_shim.errors import Refused
from kybernate_shim.linux.process import title_of

MINE = [os.getpid()]


@contextmanager
def program(text: str, *, descriptor: int = -1) -> Iterator[int]:
    """Run Python until the end of the block, which begins when it has written a line."""
    passed = (descriptor,) if descriptor >= 0 else ()
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, pass_fds=passed) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_epoll_set_of_own_descriptors_is_none() -> None:
    with select.epoll() as watching:
        read, write = os.pipe()
        watching.register(read, select.EPOLLIN)
        copy = os.dup(read)
        try:
            assert look(MINE).problems == []
            os.close(read)  # the open file is the process's by another number
            assert look(MINE).problems == []
        finally:
            os.close(copy)
            os.close(write)


def test_epoll_set_that_watches_what_another_process_has_is_named() -> None:
    with select.epoll() as watching:
        read, write = os.pipe()
        watching.register(read, select.EPOLLIN)
        with program("import time; print(flush=True); time.sleep(1000)", descriptor=read) as child:
            os.close(read)
            (text,) = look([*MINE, child]).problems
            assert f"[{os.getpid()}] watches by its epoll descriptor {watching.fileno()} an open file" in text
            assert f"that was descriptor {read} when it was added" in text
            assert f"[{child}] has, as its descriptor {read}" in text
        os.close(write)


def test_program_from_memory_is_named() -> None:
    text = """
import os, sys
fd = os.memfd_create("packed", 0)
os.sendfile(fd, os.open("/bin/sleep", os.O_RDONLY), 0, 1 << 26)
print(flush=True)
os.execve(fd, ["packed", "1000"], {})
"""
    with program(text) as pid:
        while not os.readlink(f"/proc/{pid}/exe").startswith("/memfd:"):  # noqa: PTH115  # it executes it in a moment
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        (problem,) = look([pid]).problems
        assert f"[{pid}] executes '/memfd:packed" in problem


def test_message_says_that_nothing_was_changed() -> None:
    with pytest.raises(Refused, match=r"container c cannot be checkpointed: 0; 1; 2; 3; 4; and 2 more\. Nothing"):
        raise not_dumpable("c", [str(number) for number in range(7)])


def test_processes_that_have_ended_hold_nothing() -> None:
    with program("print(flush=True)") as pid:
        pass
    assert look([pid]).problems == []


def test_search_for_what_epoll_sets_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undumpable, "MOST_SECONDS", -1.0)
    with select.epoll() as watching:
        read, write = os.pipe()
        watching.register(read, select.EPOLLIN)
        try:
            (text,) = look(MINE).problems
            assert f"could not be examined within -1 s, by {title_of(os.getpid())} as its descriptor" in text
        finally:
            os.close(read)
            os.close(write)
