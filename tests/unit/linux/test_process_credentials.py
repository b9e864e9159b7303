"""Privileges of running processes, as /proc shows them."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Iterator

import pytest

from kybernate_shim.linux.credentials import INFINITY, NAMESPACES, of_process, process_tree


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A shell that has a child."""
    process = subprocess.Popen(["sh", "-c", "sleep 100; true"], start_new_session=True)
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def test_own_privileges_are_those_that_the_kernel_grants() -> None:
    one = min(of_process(os.getpid(), {}), key=lambda one: one.tid != os.getpid())  # numbers of threads may be lower
    assert (one.pid, one.tid) == (os.getpid(), os.getpid())
    assert one.uids[:3] == os.getresuid()
    assert one.gids[:3] == os.getresgid()
    assert sorted(one.groups) == sorted(os.getgroups())
    assert one.node_namespaces == NAMESPACES
    assert (one.uid_map, one.gid_map) == ((), ())
    hard = [resource.getrlimit(number)[1] for number in range(16)]
    assert one.limits == tuple(INFINITY if limit == resource.RLIM_INFINITY else limit for limit in hard)


def test_every_thread_is_told() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        told = {one.tid for one in of_process(os.getpid(), {})}
        assert told >= {thread.native_id for thread in threads}
    finally:
        end.set()
        for thread in threads:
            thread.join()  # one that ends while a process is looked at lets it seem gone


def test_cgroup_that_is_not_the_containers_is_stray() -> None:
    (one, *_) = of_process(os.getpid(), {"": "/no/such/container", "pids": "/no/such/container"})
    assert one.stray_cgroup


def test_descendants_are_found(other: subprocess.Popen[bytes]) -> None:
    while len(found := process_tree(other.pid)) < 2:
        assert other.poll() is None
    assert found[0] == other.pid
    assert set(found) <= set(process_tree(os.getpid()))


def test_process_that_has_ended_vanishes() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        of_process(process.pid, {})


def test_dead_process_has_no_privileges() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert of_process(process.pid, {}) == ()
    finally:
        process.wait()
