"""What processes have made of themselves is the same after checkpoint and restore.

Each row of tests/system/identities.py is a process that changes one thing and says all that it is: before a checkpoint,
in place after it, and from a new container. Containers are root's and a user's, of `ctr` and of pods.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.system.checkpoints import PYTHON, kybernate, refused, restored, save
from tests.system.cri import Cri
from tests.system.ctr import Ctr, eventually
from tests.system.identities import ANYBODY, PROGRAM, ROWS

FROM = "kybernate.io/restore-from"
States = dict[str, dict[str, Any]]
VOLATILE = ["--mount", "type=tmpfs,src=tmpfs,dst=/volatile,options=rw:mode=1777"]
# Of what a row changes: where it is in the state, and what that is then.
CHANGED: dict[str, tuple[Sequence[str | int], object]] = {
    "umask": (("main", "Umask"), "0027"),
    "nice": (("main", "nice"), 7),
    "batch": (("main", "policy"), os.SCHED_BATCH),
    "idle": (("main", "policy"), os.SCHED_IDLE),
    "reset on fork": (("main", "policy"), os.SCHED_BATCH | os.SCHED_RESET_ON_FORK),
    "io priority": (("main", "io"), 2 << 13 | 6),
    "io idle": (("main", "io"), 3 << 13),
    "timer slack": (("main", "slack"), 777777),
    "core filter": (("core",), "00000007\n"),
    "out of memory": (("oom",), "777\n"),
    "filter": (("main", "refused"), ["ptrace"]),
    "two filters": (("main", "refused"), ["ptrace", "acct"]),
    "filter of a thread": (("threads", 0, "refused"), ["acct"]),
    "undumpable": (("dumpable",), 0),
    "no new privileges": (("main", "NoNewPrivs"), "1"),
    "process settings": (("subreaper",), 1),
    "signals": (("main", "ShdPnd"), f"{1 << 11 | 1 << 36:016x}"),
    "session": (("directory",), "/usr/lib"),
    "threads": (("threads", 2, "slack"), 100002),
    "user": (("main", "Groups"), "7 8 "),
    "saved ids": (("main", "Uid"), "1000\t1001\t1002\t1001"),
    "filesystem ids": (("main", "Uid"), "0\t0\t0\t1008"),
    "bounding": (("main", "CapBnd"), f"{0xA80425FB & ~(1 << 13 | 1 << 18):016x}"),
    "ambient": (("main", "CapAmb"), f"{1 << 10:016x}"),
    "inheritable": (("main", "CapInh"), f"{1 | 1 << 10:016x}"),
    "no capabilities": (("main", "CapPrm"), f"{0:016x}"),
    "securebits": (("main", "securebits"), 0x0F),
    "keep capabilities": (("main", "keepcaps"), 1),
    "setuid program": (("main", "Uid"), "1000\t0\t0\t0"),
    "ids of a thread": (("threads", 0, "Uid"), "1234\t1234\t0\t1234"),
    "capabilities of a thread": (("threads", 0, "CapPrm"), f"{1 | 1 << 10:016x}"),
    "limits of a user": (("main", "Uid"), "1000\t1000\t1000\t1000"),
    "undumpable user": (("dumpable",), 0),
    "root again": (("main", "Uid"), "1000\t0\t0\t0"),
}


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "image"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def cri() -> Iterator[Cri]:
    cri = Cri()
    yield cri
    cri.close()


def command(rows: Sequence[str]) -> list[str]:
    return ["python3", "-c", PROGRAM, ",".join(rows)]


def states(lines: Sequence[str], rows: Sequence[str]) -> States:
    """Return the last thing that all rows have said; nothing where they have not finished it."""
    if not lines or lines[-1] != "END":
        return {}
    said = [json.loads(line.removeprefix("STATE ")) for line in lines[-len(rows) - 1 : -1]]
    return dict(said)


def answered(log: Callable[[], Sequence[str]], rows: Sequence[str], times: int) -> States:
    """Wait until the rows have said so many times what they are, and return the last time."""
    eventually(lambda: list(log()).count("END") == times, seconds=60)
    return states(log(), rows)


def assert_changed(found: States) -> None:
    """Each row has done what its name says, so that the comparison is about something."""
    for row, state in found.items():
        assert "failed" not in state, f"{row}: {state}"
        if row in CHANGED:
            value: Any = state
            for key in CHANGED[row][0]:
                value = value[key]
            assert value == CHANGED[row][1], f"{row}: {value!r} at {CHANGED[row][0]}"
    if len(os.sched_getaffinity(0)) > 1:
        assert len(found["cpu"]["main"]["cpus"]) == 1
    started = found["as started"]["limits"]
    kept = [kind for kind, (old, new) in enumerate(zip(started, found["limits"]["limits"], strict=True)) if old == new]
    assert all(max(started[kind]) <= 64 or kind == 6 for kind in kept), f"limits {kept} are as they were"


def differences(before: States, after: States) -> dict[str, dict[str, object]]:
    """Return what differs, by row and place, as a pair."""
    found: dict[str, dict[str, object]] = {}
    for row, state in before.items():
        one, other = dict(_flat(state)), dict(_flat(after.get(row, {})))
        keys = [key for key in one.keys() | other if one.get(key) != other.get(key)]
        if changed := {key: (one.get(key), other.get(key)) for key in keys}:
            found[row] = changed
    return found


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, object]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inside is None:
        yield place, value
    else:
        for key, one in inside:
            yield from _flat(one, f"{place}.{key}")


AS_ROOT = pytest.mark.as_root("half of the rows need it")
CTR = {
    "root": pytest.param(ROWS, ["--allow-new-privs", *VOLATILE], marks=AS_ROOT, id="root"),
    "user": pytest.param(ANYBODY, ["--seccomp", "--read-only", *VOLATILE], id="user"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "flags"), CTR.values())
def test_identities_stay_in_containers(image: Path, rows: Sequence[str], flags: list[str]) -> None:
    ours, log = Ctr(image=PYTHON), image.parent / "log"

    def said() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    with ours.running(*command(rows), flags=["--log-uri", f"file://{log}", *flags]) as id:
        before = answered(said, rows, 1)
        assert_changed(before)
        save(ours, id, image)
        ours("task", "kill", "-s", "SIGUSR1", id)
        assert differences(before, answered(said, rows, 2)) == {}
    log.unlink()
    with restored(ours, image, log=log, container_image=PYTHON, flags=flags) as again:
        ours("task", "kill", "-s", "SIGUSR1", again.id)
        assert differences(before, answered(said, rows, 1)) == {}


PODS = {
    "root": pytest.param(ROWS, {}, marks=AS_ROOT, id="root"),
    "user": pytest.param(ANYBODY, {"no_new_privs": True, "seccomp": "RuntimeDefault"}, id="user"),
}


@pytest.mark.parametrize(("rows", "options"), PODS.values())
def test_identities_stay_in_pods(cri: Cri, pods_image: Path, rows: Sequence[str], options: dict[str, Any]) -> None:
    with cri.pod() as pod:
        id = cri.run(pod, "c", command(rows), image=PYTHON, **options)
        before = answered(lambda: cri.log(pod, "c"), rows, 1)
        assert_changed(before)
        save(Ctr(namespace="k8s.io"), pod.id, pods_image, id=id)
        assert cri.exec(id, "kill", "-USR1", "1")[0] == 0
        assert differences(before, answered(lambda: cri.log(pod, "c"), rows, 2)) == {}
    with cri.pod(annotations={FROM: pods_image.name}) as pod:
        id = cri.run(pod, "c", ["false"], image=PYTHON, **options)
        assert cri.exec(id, "kill", "-USR1", "1")[0] == 0
        assert differences(before, answered(lambda: cri.log(pod, "c"), rows, 1)) == {}


# -- what cannot be kept ----------------------------------------------------------------------------------------------

ODD = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
begun = threading.Event()
def part(flags):
    if libc.unshare(flags):
        print("failed", ctypes.get_errno(), flush=True)
    begun.set()
    time.sleep(1000)
flags = int(sys.argv[2])
if sys.argv[1] == "thread":
    threading.Thread(target=part, args=(flags,), daemon=True).start()
elif os.fork() == 0:
    part(flags)
else:
    begun.set()
begun.wait()
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
"""
FS, FILES, NEW_UTS, NEW_USER, NEW_NET = 0x200, 0x400, 0x04000000, 0x10000000, 0x40000000
ADMIN = ["--cap-add", "CAP_SYS_ADMIN"]
NEEDS_ROOT = pytest.mark.as_root("a program without CAP_SYS_ADMIN makes no namespace but one of users")
LOST = {
    "directory": pytest.param(FS, [], "a working directory, root and umask of its own", id="directory"),
    "descriptors": pytest.param(FILES, [], "a table of descriptors of its own", id="descriptors"),
    "network": pytest.param(NEW_NET, ADMIN, "a network namespace of its own", id="network", marks=NEEDS_ROOT),
    "hostname": pytest.param(NEW_UTS, ADMIN, "a uts namespace of its own", id="hostname", marks=NEEDS_ROOT),
}


def numbers(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []


def goes_on(log: Path) -> None:
    seen = len(numbers(log))
    eventually(lambda: len(numbers(log)) > seen + 2)
    assert numbers(log) == list(range(1, len(numbers(log)) + 1))


@pytest.mark.parametrize(("kind", "flags", "text"), LOST.values())
def test_state_of_a_single_thread_is_refused_before_the_dump(
    image: Path, kind: int, flags: list[str], text: str
) -> None:
    ours, log = Ctr(image=PYTHON), image.parent / "log"
    odd = ["python3", "-c", ODD, "thread", str(kind)]
    with ours.running(*odd, flags=["--log-uri", f"file://{log}", *flags]) as id:
        goes_on(log)
        said = refused("kybernate", "checkpoint", id, str(image), "--exit")
        assert f"of python3[{ours.pid(id)}] has {text}" in said
        assert "End the thread" in said
        assert not image.exists()
        goes_on(log)
        kybernate("checkpoint", id, str(image), "--force")
        goes_on(log)


def test_nested_namespace_is_refused_before_anything_is_frozen(image: Path) -> None:
    ours, log = Ctr(image=PYTHON), image.parent / "log"
    odd = ["python3", "-c", ODD, "process", str(NEW_USER)]
    with ours.running(*odd, flags=["--log-uri", f"file://{log}"]) as id:
        goes_on(log)
        said = refused("kybernate", "checkpoint", id, str(image), "--exit", "--force")
        assert "has a user namespace of its own: CRIU dumps no nested namespaces" in said
        assert f"container {id} continues as before" in said
        assert not image.exists()
        goes_on(log)


PEERS = """
import socket, signal, struct
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
near, far = socket.socketpair()
while True:
    print(struct.unpack("iII", near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1], flush=True)
    signal.sigwait([signal.SIGUSR1])
"""


def test_users_of_sockets_are_said_to_be_lost(image: Path) -> None:
    """A socket that was connected before names root to its peer, which no program but the kernel can change."""
    ours, log = Ctr(image=PYTHON), image.parent / "log"
    with ours.running("python3", "-c", PEERS, flags=["--log-uri", f"file://{log}"]) as id:
        eventually(lambda: numbers(log) == [1000])
        save(ours, id, image)
        messages = Path("/var/log/lab/containerd.log").read_text()
        assert f'"task": "{id}", "outcome": "2 UNIX sockets will name root' in messages.replace('":"', '": "')
        log.unlink()
        with restored(ours, image, log=log, container_image=PYTHON) as again:
            ours("task", "kill", "-s", "SIGUSR1", again.id)
            eventually(lambda: numbers(log) == [0])
