"""What CRIU gets where root lacks CAP_SYS_RESOURCE: it answers what a process itself says, and sets nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import criu_limits

pytestmark = pytest.mark.skipif(criu_limits.has_sys_resource(), reason="nothing is preloaded where root may ask")


OTHER = """
import json, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 4096))
resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, resource.RLIM_INFINITY))
os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
print(json.dumps([resource.getrlimit(kind) for kind in range(16)]), flush=True)
sys.stdin.read()
"""
# As CRIU asks: by syscall(2) of the C library, for each kind in turn.
ASKS = """
import ctypes, json, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
number = {"x86_64": 302, "aarch64": 261}[os.uname().machine]
pid, found = int(sys.argv[1]), []
def ask(kind, new=None):
    pair = (ctypes.c_long * 2)()
    result = libc.syscall(*map(ctypes.c_long, (number, pid, kind, ctypes.addressof(new) if new else 0)), pair)
    return list(pair) if result == 0 else ctypes.get_errno()
wanted = (ctypes.c_long * 2)(0, 4096)
child = subprocess.run([sys.executable, "-c", "print(open('/proc/self/maps').read())"], capture_output=True, text=True)
print(json.dumps({
    "limits": [ask(kind) for kind in range(16)], "none": ask(16), "set": ask(4, wanted),
    "child": "limits_of_others" in child.stdout,
}))
"""
EPERM = 1


@pytest.fixture
def other() -> Iterator[tuple[int, list[list[int]]]]:
    """A process of another user, and what it says of its limits."""
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())
        process.communicate("")


def asked(pid: int, assignment: str) -> dict[str, object]:
    command = ["sh", "-c", f'{assignment}exec "$@"', "sh", sys.executable, "-c", ASKS, str(pid)]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_limits_are_what_the_process_says(other: tuple[int, list[list[int]]], tmp_path: Path) -> None:
    pid, limits = other
    assert asked(pid, "")["limits"] == [EPERM] * 16
    answer = asked(pid, criu_limits.preloaded(tmp_path / "limits_of_others.so"))
    assert answer["limits"] == limits
    assert answer["none"] == EPERM
    assert answer["set"] == EPERM
    assert answer["child"] is False


def test_processes_that_have_ended_have_no_limits(tmp_path: Path) -> None:
    assert asked((1 << 22) + 1, criu_limits.preloaded(tmp_path / "limits_of_others.so"))["limits"] == [3] * 16
