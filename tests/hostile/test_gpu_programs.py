"""A tenant's programs on a GPU that stand in the way of suspend, resume and checkpoint, and what they cost others.

Each row does something odd to a process with GPU state, all the while the verbs are carried out. Each of them ends by
its deadline, with success or in words. The helper stays the process that it is, the neighbour on the same GPU is
suspended and resumed as ever, and nothing of the container is left on the GPU.
"""

# ruff: noqa: F811  # pytest finds fixtures by the names of parameters
from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kybernate_shim.gpu.helper_client import log_path
from tests import users
from tests.fakes.cuda import Gpus
from tests.hostile.test_programs import COUNTING, PRELUDE
from tests.system import gpu
from tests.system.checkpoints import PYTHON, Witness, kybernate
from tests.system.ctr import Ctr, eventually, finished
from tests.system.gpu.conftest import ctr, gpus, hasty, image, node  # noqa: F401  # fixtures
from tests.system.gpu.node import SOCKET, helpers
from tests.system.gpu.programs import POLLING, mounts
from tests.system.gpu.toolkit import visible

DEADLINE = 20  # seconds of each verb
SECONDS = 90  # after which a command that should have ended by its deadline hangs
ROUNDS = 2

COMPUTING = (
    PRELUDE
    + """
import subprocess
def computing():
    steps = "/tmp/steps%d" % time.monotonic_ns()
    one = subprocess.Popen(["/opt/cuda/computes", "2", "5", "0"], stdout=open(steps, "w"))
    while not os.path.getsize(steps) and one.poll() is None: time.sleep(0.01)
    os.unlink(steps)
    return one
one = computing()
"""
)


@dataclass(frozen=True)
class Row:
    """What is done to `one`, a process that computes."""

    name: str
    program: str


ROWS = (
    Row("a process that is stopped", "one.send_signal(signal.SIGSTOP)"),
    Row(
        "a process that is stopped and continued without end",
        """
def stopping(ready):
    ready()
    while True: os.kill(one.pid, signal.SIGSTOP); os.kill(one.pid, signal.SIGCONT)
child(stopping)
""",
    ),
    Row(
        "a process that is killed and started again without end",
        """
def killing(ready):
    ready()
    while True: mine = computing(); mine.kill(); mine.wait()
child(killing)
""",
    ),
    Row(
        "siblings that are killed whenever there are some",
        """
def killing(ready):
    ready()
    while True:
        mine = [computing() for n in range(3)]
        for each in mine: each.kill()
        for each in mine: each.wait()
child(killing)
""",
    ),
    Row(
        "a process that executes its program again without end",
        """
again = '''
import os, sys
from array import array
sys.path.insert(0, "/opt/cuda")
from computes import Gpu
one = Gpu(0, array("I", range(1024))); one.advance()
os.execv(sys.executable, [sys.executable, "-c", os.environ["AGAIN"]])
'''
os.environ["AGAIN"] = again
subprocess.Popen([sys.executable, "-c", again])
""",
    ),
    Row(
        "forks without end beside it",
        """
def forking(ready):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN); ready()
    while True:
        if os.fork() == 0: os.setsid(); os._exit(0)
        time.sleep(0.005)  # other lanes have the same CPUs
for n in range(2): child(forking)
""",
    ),
    Row(
        "a process that closes and replaces each descriptor that it has",
        """
code = '''
import os, sys, threading, time
from array import array
sys.path.insert(0, "/opt/cuda")
from computes import Gpu
one = Gpu(0, array("I", range(1024)))
def closing():
    null = os.open("/dev/null", os.O_RDWR)
    while True:
        for fd in range(3, 64):
            if fd != null:
                try: os.close(fd); os.dup2(null, fd)
                except OSError: pass
        time.sleep(0.001)
threading.Thread(target=closing, daemon=True).start()
while True: one.advance()
'''
subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
""",
    ),
    Row(
        "a process that cannot be looked at, and whose threads take names of the driver's",
        """
code = '''
import ctypes, sys, threading
from array import array
sys.path.insert(0, "/opt/cuda")
from computes import Gpu
libc = ctypes.CDLL(None)
one = Gpu(0, array("I", range(1024)))
libc.prctl(4, 0, 0, 0, 0)
def named():
    for name in (b"kybernate-arena", b"cuda-EvtHandlr", b"cuda0", b"\\\\xff\\\\n)"): libc.prctl(15, name, 0, 0, 0)
    while True: libc.prctl(15, b"cuda-EvtHandlr", 0, 0, 0)
threading.Thread(target=named, daemon=True).start()
while True: one.advance()
'''
subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
""",
    ),
    Row(
        "a tracer that seizes it and lets it go without end",
        """
def tracer(ready):
    ready()
    while True:
        if libc.ptrace(0x4206, one.pid, None, None): time.sleep(0.001); continue  # another one traces it
        libc.ptrace(0x4207, one.pid, None, None)
        os.waitpid(one.pid, 0x40000001); libc.ptrace(17, one.pid, None, None)
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
child(tracer)
""",
    ),
)


@contextmanager
def attacking(ctr: Ctr, row: Row, user: int) -> Iterator[Witness]:
    log = Path(f"/tmp/{ctr.new_id('log')}")
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    flags = ["--log-uri", f"file://{log}", *mounts(), *visible(0), *POLLING]
    flags += users.flags(flags) if user else []
    try:
        with own.running("python3", "-c", COMPUTING + row.program + COUNTING, flags=flags) as id:
            witness = Witness(id, log)
            eventually(lambda: witness.count() > 2, seconds=60)
            yield witness
    finally:
        log.unlink(missing_ok=True)


def ended(*argv: str) -> str:
    """Carry a verb out, which succeeds or is refused in words; return these."""
    done = finished(["kybernate", *argv], timeout=SECONDS)
    said = done.stderr.decode(errors="replace")
    assert "Traceback" not in said
    assert done.returncode == 0 or said
    return said if done.returncode else ""


AS_ROOT = ("a tracer that seizes it and lets it go without end", "forks without end beside it")
AS = [*((row, users.UID) for row in ROWS), *((row, 0) for row in ROWS if row.name in AS_ROOT)]


@pytest.mark.parametrize(("row", "user"), AS, ids=lambda value: value.name if isinstance(value, Row) else str(value))
def test_verbs_end_and_cost_no_other_container(
    ctr: Ctr, gpus: Gpus, hasty: None, image: Path, row: Row, user: int
) -> None:
    (helper,) = helpers()
    log_begins = len(log_path(SOCKET).read_text())
    with gpu.computing(ctr) as neighbour:
        with attacking(ctr, row, user) as one, ThreadPoolExecutor(1) as pool:
            for number in range(ROUNDS):
                verbs = pool.submit(attack, one.id, image.parent / str(number))
                while not verbs.done():
                    kybernate("suspend", neighbour.id)
                    kybernate("resume", neighbour.id)
                    neighbour.computes_on()
                print(row.name, verbs.result())
                one.assert_goes_on()
        neighbour.computes_on()
        assert helpers() == [helper]
        assert "Traceback" not in log_path(SOCKET).read_text()[log_begins:]


def attack(id: str, image: Path) -> list[str]:
    """Carry out each verb on a container once; return what was said."""
    seconds = ("--timeout", str(DEADLINE))
    said = [ended("suspend", id, *seconds), ended("resume", id, *seconds)]
    return [*said, ended("checkpoint", id, str(image), *seconds), ended("resume", id, *seconds)]


GARBAGE = (
    b"",
    os.urandom(4096),
    struct.pack(">IIBB", 0x7FFFFFFF, 1, 1, 0),  # a frame that announces more than there is
    struct.pack(">IIBB", 16, 1, 1, 0) + os.urandom(16),
    struct.pack(">IIBB", 4 << 20, 1, 1, 0) + bytes(4 << 20),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1024),
)


def test_helpers_socket_is_roots_and_bears_garbage(ctr: Ctr, gpus: Gpus) -> None:
    (helper,) = helpers()
    as_user = ["setpriv", "--reuid", str(users.UID), "--regid", str(users.UID), "--clear-groups", "python3", "-c"]
    program = f"import socket; socket.socket(socket.AF_UNIX).connect({str(SOCKET)!r})"
    assert b"PermissionError" in finished([*as_user, program]).stderr
    before = psutil.Process(helper.pid).memory_info().rss
    half_open = []
    for _ in range(20):
        for garbage in GARBAGE:
            one = socket.socket(socket.AF_UNIX)
            one.settimeout(10)
            one.connect(str(SOCKET))
            half_open.append(one)
            try:
                one.sendall(garbage)
            except OSError:
                pass  # it has hung up by then
    with gpu.computing(ctr) as container:
        kybernate("suspend", container.id)
        kybernate("resume", container.id)
        container.computes_on()
    for one in half_open:
        one.close()
    assert helpers() == [helper]
    assert psutil.Process(helper.pid).memory_info().rss < before + (64 << 20)
