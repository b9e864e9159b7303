"""`kybernate doctor` on a node that is broken on purpose: each thing is named, with a remedy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.node import Containerd
from tests.system.ctr import containerd_version, eventually

CONFIG = Path("/etc/containerd/config.toml")
SHIM = Path("/usr/local/bin/containerd-shim-kybernate-v1")
SOCKET = Path("/run/containerd/containerd.sock")
STATE = Path("/var/lib/containerd")
CRI_2, CRI_3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"


def report(*flags: str, user: int = 0) -> tuple[int, dict[str, tuple[str, str, str]], str]:
    """Return doctor's exit status, the first of the worst lines of each subject, and what it printed."""
    done = subprocess.run(
        ["kybernate", "doctor", "-o", "json", *flags],
        capture_output=True,
        text=True,
        check=False,
        user=user,
        group=user,
    )
    assert "Traceback" not in done.stderr, done.stderr
    order = ("ok", "note", "bad")
    lines: dict[str, tuple[str, str, str]] = {}
    for one in json.loads(done.stdout):
        line = one["verdict"], one["found"], one["advice"]
        known = lines.get(one["subject"])
        if known is None or order.index(line[0]) > order.index(known[0]):
            lines[one["subject"]] = line
    return done.returncode, lines, done.stdout


@pytest.fixture(scope="module")
def usual() -> dict[str, tuple[str, str, str]]:
    """What is found on the lab's node as it is."""
    return report()[1]


def named(subject: str, words: str, remedy: str, usual: dict[str, tuple[str, str, str]]) -> None:
    """Assert that a subject is bad now, in these words, and was not before."""
    status, lines, printed = report()
    assert status == 1
    assert usual.get(subject, ("ok",))[0] != "bad", usual[subject]
    verdict, found, advice = lines[subject]
    assert verdict == "bad", printed
    assert words in found
    assert remedy in advice


@contextmanager
def rewritten(change: Any) -> Iterator[None]:
    """Change containerd's main file, which it does not read again until it is restarted."""
    before, times = CONFIG.read_text(), CONFIG.stat()
    try:
        CONFIG.write_text(change(before))
        yield
    finally:
        CONFIG.write_text(before)
        os.utime(CONFIG, ns=(times.st_atime_ns, times.st_mtime_ns))


def cri() -> str:
    return CRI_2 if containerd_version() < (2, 0) else CRI_3


def without_handlers(text: str) -> str:
    return "\n\n".join(one for one in text.split("\n\n") if "runtimes.kybernate" not in one) + "\n"


def test_node_as_it_is_has_what_pods_need(usual: dict[str, tuple[str, str, str]]) -> None:
    for subject in (
        "containerd",
        "containerd's process",
        "containerd's socket",
        "containerd's configuration",
        "handlers",
    ):
        assert usual[subject][0] == "ok", usual[subject]
    assert usual["shim of kybernate"][0] == "ok"


def test_syntax_error(usual: dict[str, tuple[str, str, str]]) -> None:
    with rewritten(lambda text: text + "[[[\n"):
        named("containerd's configuration", f"{CONFIG}: ", f"correct {CONFIG}", usual)


def test_duplicated_table(usual: dict[str, tuple[str, str, str]]) -> None:
    block = f'\n[plugins."{cri()}".containerd.runtimes.kybernate]\nruntime_type = "io.containerd.kybernate.v1"\n'
    with rewritten(lambda text: text + block):
        named("containerd's configuration", "twice", f"correct {CONFIG}", usual)


def test_handler_that_is_missing(usual: dict[str, tuple[str, str, str]]) -> None:
    with rewritten(without_handlers):
        named("containerd's configuration", "handlers of Kybernate: none", "kybernate setup containerd", usual)


def test_handler_that_is_not_loaded_yet(usual: dict[str, tuple[str, str, str]]) -> None:
    with rewritten(without_handlers):
        Containerd().restart()
    try:
        named("handlers", "not loaded", "systemctl restart containerd", usual)
    finally:
        Containerd().restart()


def test_wrong_runtime_type(usual: dict[str, tuple[str, str, str]]) -> None:
    block = f'\n[plugins."{cri()}".containerd.runtimes.kybernate]\nruntime_type = "io.containerd.kybernat.v1"\n'
    with rewritten(lambda text: without_handlers(text) + block):
        named("containerd's configuration", "'io.containerd.kybernat.v1'", "kybernate setup containerd", usual)


def test_table_of_another_version(usual: dict[str, tuple[str, str, str]]) -> None:
    other = CRI_3 if cri() == CRI_2 else CRI_2
    block = f'\n[plugins."{other}".containerd.runtimes.kybernate]\nruntime_type = "io.containerd.kybernate.v1"\n'
    with rewritten(lambda text: without_handlers(text) + block):
        named("containerd's configuration", other, "kybernate setup containerd", usual)


@contextmanager
def other_shim(content: bytes | None) -> Iterator[None]:
    before = SHIM.read_bytes()
    try:
        SHIM.unlink()
        if content is not None:
            SHIM.write_bytes(content)
            SHIM.chmod(0o755)
        yield
    finally:
        SHIM.unlink(missing_ok=True)
        SHIM.write_bytes(before)
        SHIM.chmod(0o755)


def test_shim_that_was_removed(usual: dict[str, tuple[str, str, str]]) -> None:
    with other_shim(None):
        named("shim of kybernate", "is missing", "kybernate_shim.launcher /usr/local/bin", usual)


def test_shim_of_another_version(usual: dict[str, tuple[str, str, str]]) -> None:
    with other_shim(b"#!/bin/sh\necho containerd-shim-kybernate-v1:\necho '  Version: 0.0.1'\n"):
        named("shim of kybernate", "version 0.0.1", "kybernate_shim.launcher", usual)


def test_containerd_that_was_stopped(usual: dict[str, tuple[str, str, str]]) -> None:
    daemon = Containerd()
    daemon.kill()
    try:
        named("containerd's process", "does not run", "systemctl start containerd", usual)
    finally:
        daemon.start()
        daemon.wait_ready()


def test_containerd_that_hangs(usual: dict[str, tuple[str, str, str]]) -> None:
    pid = Containerd().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        named("containerd's process", "stopped by a signal", f"kill -CONT {pid}", usual)
    finally:
        os.kill(pid, signal.SIGCONT)
        eventually(Containerd().serves)


def test_socket_that_is_open_to_all(usual: dict[str, tuple[str, str, str]]) -> None:
    mode = SOCKET.stat().st_mode
    SOCKET.chmod(0o666)
    try:
        named("containerd's socket", "mode 0666", "chmod 0660", usual)
    finally:
        SOCKET.chmod(mode)


def test_user_who_may_not_ask_reads_so() -> None:
    _, lines, _ = report(user=65534)
    verdict, found, advice = lines["containerd's socket"]
    assert (verdict, advice) == ("note", "run as root")
    assert "may not connect" in found


@contextmanager
def mounted(place: Path, *argv: str) -> Iterator[None]:
    subprocess.run(["mount", *argv, str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_state_that_is_read_only(usual: dict[str, tuple[str, str, str]]) -> None:
    with mounted(STATE, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        named("containerd's root", "is mounted read-only", "remount,rw", usual)


def test_disk_that_is_full(usual: dict[str, tuple[str, str, str]]) -> None:
    with mounted(STATE, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        named("containerd's root", "is full", "make room", usual)


def test_tier_that_is_read_only(usual: dict[str, tuple[str, str, str]]) -> None:
    place = Path("/var/lib/kybernate/checkpoints")
    made = not place.exists()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with mounted(place, "-t", "tmpfs", "-o", "ro,mode=0700", "tmpfs"):
            named("tier disk", "is mounted read-only", "remount,rw", usual)
    finally:
        if made:
            shutil.rmtree(place)
