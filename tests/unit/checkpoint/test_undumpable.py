"""What is found before a dump, on a process of this machine."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import undumpable
from kybernate_shim.checkpoint.descriptor_kinds import NEVER, problem_of
from kybernate_shim.checkpoint.undumpable import Looked, look, not_dumpable, require_few_descriptors
from kybernate_shim.errors import Refused
from kybernate_shim.linux import process as linux_process
from kybernate_shim.linux.descriptors import mount_of, mounts_of
from kybernate_shim.linux.held_files import HeldFile, held_files
from kybernate_shim.linux.process import state_of, title_of

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
            assert f"[{os.getpid()}] watches, by its epoll descriptor {watching.fileno()}, an open file" in text
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
    found = Looked()
    found.add(*(str(number) for number in range(7)))
    with pytest.raises(Refused, match=r"container c cannot be checkpointed: 0; 1; 2; 3; 4; and 2 more\. Nothing"):
        raise not_dumpable("c", found)


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


def test_eventfd_that_is_a_semaphore_is_named() -> None:
    plain, semaphore = os.eventfd(7), os.eventfd(7, os.EFD_SEMAPHORE)
    try:
        (text,) = look(MINE).problems
        assert f"[{os.getpid()}] has as its descriptor {semaphore} an eventfd(2) with EFD_SEMAPHORE" in text
    finally:
        os.close(plain)
        os.close(semaphore)
    assert look(MINE).problems == []


def test_pipe_of_packets_is_named() -> None:
    plain, packets = os.pipe(), os.pipe2(os.O_DIRECT)
    try:
        (text,) = look(MINE).problems  # its end for writing; a read takes what comes
        assert f"descriptor {packets[1]} a pipe of packets" in text
    finally:
        for end in (*plain, *packets):
            os.close(end)


def test_descriptors_of_kinds_that_criu_does_not_know_are_named() -> None:
    for name, (what, remedy) in NEVER.items():
        held = HeldFile(os.getpid(), "descriptor 4", "/proc/self/fd/4", name)
        text = problem_of(held)
        assert what in text
        assert remedy in text
        assert f"[{os.getpid()}] has as its descriptor 4" in text
    for name in ("anon_inode:[eventpoll]", "anon_inode:[signalfd]", "anon_inode:[timerfd]", "anon_inode:[pidfd]"):
        assert problem_of(HeldFile(os.getpid(), "descriptor 4", "/proc/self/fd/4", name)) == ""


LEADERLESS = """
import ctypes, threading, time
def wait():
    time.sleep(0.05)
    print(flush=True)
    time.sleep(1000)
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_process_without_its_first_thread_is_named() -> None:
    with program(LEADERLESS) as pid:
        eventually_ended(pid)
        assert any("the first thread of" in text and f"[{pid}]" in text for text in look([pid]).problems)


def eventually_ended(pid: int) -> None:
    end = time.monotonic() + 20
    while state_of(pid) != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_traced_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux_process, "is_nodes_own", lambda pid: False)
    tracer = """
import ctypes, os, time
libc, child = ctypes.CDLL(None), os.fork()
if child == 0:
    time.sleep(1000)
assert libc.ptrace(0x4206, child, None, None) == 0  # PTRACE_SEIZE
print(child, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", tracer], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            (text,) = look([process.pid, child]).problems
            assert f"[{child}] is traced by {title_of(process.pid)} (ptrace(2))" in text
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ((socket.AF_INET, socket.SOCK_STREAM, 262), "a socket of MPTCP, which CRIU cannot dump: programs in Go"),
        ((40, socket.SOCK_STREAM, 0), "a socket of vsock(7), which CRIU cannot dump: close it"),
    ],
    ids=["mptcp", "vsock"],
)
def test_socket_of_a_kind_that_criu_does_not_know_is_named(kind: tuple[int, int, int], words: str) -> None:
    try:
        one = socket.socket(*kind)
    except OSError as error:
        pytest.skip(f"this kernel has no such sockets: {error}")
    with one:
        (text,) = look(MINE).problems
        assert f"[{os.getpid()}] has as its descriptor {one.fileno()} {words}" in text


def test_sockets_of_usual_kinds_are_not_named() -> None:
    kinds = [(family, kind) for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) for kind in (1, 2)]
    made = [socket.socket(*kind) for kind in [*kinds, (socket.AF_NETLINK, socket.SOCK_RAW)]]
    try:
        assert look(MINE).problems == []
    finally:
        for one in made:
            one.close()


def test_alarm_of_the_machine_is_named() -> None:
    libc = ctypes.CDLL(None)
    alarm = libc.timerfd_create(9, os.O_CLOEXEC)
    if alarm < 0:
        pytest.skip("this user may not wake the machine")
    try:
        (text,) = look(MINE).problems
        assert f"descriptor {alarm} a timerfd of CLOCK_BOOTTIME_ALARM" in text
    finally:
        os.close(alarm)


def test_memory_of_huge_pages_is_named() -> None:
    try:
        huge = os.memfd_create("pool", os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    small = os.memfd_create("small")
    try:
        (text,) = look(MINE).problems
        assert f"descriptor {huge} '/memfd:pool', a memfd of huge pages" in text
    finally:
        os.close(huge)
        os.close(small)


def test_file_of_a_mount_that_is_not_seen_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        number = mount_of(f"/proc/self/fdinfo/{file.fileno()}")
        others = [one for one in mounts_of(MINE[0]) if one != number]
        monkeypatch.setattr(undumpable, "mounts_of", lambda pid: others)
        monkeypatch.setattr(undumpable, "SHOWN", 1000)  # more files of that mount may be open here, such as a log
        found = look(MINE).problems
    assert any(f"has '{tmp_path}/file' open as its descriptor" in text and "on no mount" in text for text in found)


def test_what_is_held_a_thousand_times_is_counted_and_not_remembered(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    held = [os.open(tmp_path / "fifo", os.O_PATH) for _ in range(500)]
    try:
        found = look(MINE)
    finally:
        for fd in held:
            os.close(fd)
    assert (len(found.problems), found.more) == (undumpable.SHOWN, 500 - undumpable.SHOWN)
    assert "the FIFO by O_PATH" in found.problems[-1]
    assert str(not_dumpable("c", found)).endswith("; and 495 more. Nothing was changed")


def test_more_descriptors_than_are_looked_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undumpable, "MOST_DESCRIPTORS", 100)
    text = "import os, time; held = [os.dup(0) for _ in range(90)]; print(flush=True); time.sleep(1000)"
    with program(text) as one, program(text) as other:
        require_few_descriptors("c", [one])
        with pytest.raises(Refused, match=r"its processes have more than 100 descriptors open, .* alone 9"):
            require_few_descriptors("c", [one, other])


def test_more_watched_files_than_criu_is_told_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undumpable, "_watches", lambda held: zip(repeat(1), count()))
    monkeypatch.setattr(undumpable, "WATCHERS", {"pipe": "inotify"})
    monkeypatch.setattr(undumpable, "held_files", lambda pids: iter([HeldFile(os.getpid(), "one", "/proc", "pipe")]))
    (said,) = look(MINE).problems
    assert f"watch more than {undumpable.MOST_WATCHED} files of the root filesystem by inotify" in said


def test_mapped_files_are_looked_at_one_at_a_time(tmp_path: Path) -> None:
    """A process may have a million of them, each with a path of 4 KiB."""
    (place := tmp_path / ("x" * 250) / ("x" * 250)).mkdir(parents=True)
    (place / "file").write_bytes(bytes(4096))
    with (place / "file").open("r+b") as file:
        kept = [mmap.mmap(file.fileno(), 4096) for _ in range(2000)]
    (place / "file").unlink()
    tracemalloc.start()
    try:
        assert sum(one.what == "mapped file" for one in held_files(MINE, mapped=True)) >= len(kept)
        assert tracemalloc.get_traced_memory()[1] < 200 << 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("closed", "problems"), [(0, 1), (7, 1), (8, 0)])
def test_process_that_can_open_nothing_more_is_named(closed: int, problems: int) -> None:
    """A descriptor that a lower limit has left above itself takes no place."""
    text = f"""
import os, resource, time
os.dup2(0, 900)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
try:
    while True: last = os.dup(0)
except OSError: pass
for number in range({closed}): os.close(last - number)
print(flush=True)
time.sleep(1000)
"""
    with program(text) as pid:
        found = look([pid]).problems
    assert len(found) == problems
    if found:
        assert f"has {closed} descriptors left of its 100 (RLIMIT_NOFILE), and CRIU needs 8 there" in found[0]
