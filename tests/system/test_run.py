"""`ctr run`: what goes in, what comes out, and how it ends; the stock shim must behave the same."""

from __future__ import annotations

import hashlib
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from fcntl import ioctl

import pytest

from tests.system.ctr import CommandFailed, Ctr, eventually, run


def test_output_is_the_containers(ctr: Ctr) -> None:
    assert ctr.run("echo", "hello") == "hello\n"


def test_stdout_and_stderr_stay_apart(ctr: Ctr) -> None:
    argv = ctr.run_argv(ctr.new_id(), "sh", "-c", "echo out; echo err >&2", flags=["--rm"])
    done = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 0)])
def test_exit_code_is_passed_on(ctr: Ctr, script: str, status: int) -> None:
    # A shell that is pid 1 cannot kill itself with SIGKILL: the kernel protects init from its own namespace.
    ctr.run("sh", "-c", script, status=status)


def test_kill_gives_128_and_the_signals_number(ctr: Ctr) -> None:
    id = ctr.new_id()
    with subprocess.Popen(ctr.run_argv(id, "sleep", "1000", flags=["--rm"]), stdin=subprocess.DEVNULL) as client:
        eventually(lambda: ctr.status(id) == "RUNNING")
        ctr("task", "kill", "-s", "SIGKILL", id)
        assert client.wait(20) == 137


def test_handled_signal_reaches_the_container(ctr: Ctr) -> None:
    id = ctr.new_id()
    script = "trap 'echo got it; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
    argv = ctr.run_argv(id, "sh", "-c", script, flags=["--rm"])
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        ctr("task", "kill", "-s", "SIGTERM", id)
        assert client.wait(20) == 9
        assert client.stdout.read() == "got it\n"


def test_ten_megabytes_arrive_unchanged(ctr: Ctr) -> None:
    out = ctr.run("sh", "-c", "seq 1 1400000")
    expected = "".join(f"{number}\n" for number in range(1, 1_400_001))
    assert len(out) > 10_000_000
    assert hashlib.sha256(out.encode()).hexdigest() == hashlib.sha256(expected.encode()).hexdigest()


def test_stdin_ends_when_the_client_closes_it(ctr: Ctr) -> None:
    data = os.urandom(3_000_000)
    assert ctr.run("sha256sum", stdin=data).split()[0] == hashlib.sha256(data).hexdigest()


def test_terminal_is_one_and_follows_the_clients_size(ctr: Ctr) -> None:
    id = ctr.new_id()
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    script = "tty; trap 'stty size; exit 5' WINCH; stty size; while :; do sleep 0.1; done"
    argv = ctr.run_argv(id, "sh", "-c", script, flags=["--rm", "-t"])
    client = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        seen = _read_until(master, "31 97")
        assert "/dev/pts/0" in seen
        ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 42, 120, 0, 0))
        client.send_signal(signal.SIGWINCH)
        _read_until(master, "42 120")
        assert client.wait(20) == 5
    finally:
        client.kill()
        client.wait()
        os.close(master)


def test_terminal_takes_input(ctr: Ctr) -> None:
    master, slave = pty.openpty()
    argv = ctr.run_argv(ctr.new_id(), "sh", flags=["--rm", "-t"])
    client = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        _read_until(master, "#")
        os.write(master, b"echo $((6*7))\nexit 4\n")
        _read_until(master, "42")
        assert client.wait(20) == 4
    finally:
        client.kill()
        client.wait()
        os.close(master)


def _read_until(fd: int, text: str, seconds: float = 20) -> str:
    seen, end = "", time.monotonic() + seconds
    while text not in seen:
        ready, _, _ = select.select([fd], [], [], max(0, end - time.monotonic()))
        assert ready, f"{text!r} did not come in {seconds:g} s; seen: {seen!r}"
        try:
            seen += os.read(fd, 4096).decode(errors="replace")
        except OSError:
            raise AssertionError(f"terminal closed before {text!r}; seen: {seen!r}") from None
    return seen


def test_missing_command_is_named(ctr: Ctr) -> None:
    with pytest.raises(CommandFailed, match=r"no-such-command.*(no such file|not found)"):
        ctr.run("/bin/no-such-command")


def test_detached_container_outlives_its_client(ctr: Ctr) -> None:
    with ctr.running("sleep", "1000") as id:
        pid, status = ctr.tasks()[id]
        assert status == "RUNNING"
        assert pid > 0
        os.kill(pid, 0)


def test_client_detaches_and_another_attaches(ctr: Ctr) -> None:
    """Output that comes while nobody is attached waits in the FIFO, and input still reaches the container."""
    id = ctr.new_id()
    script = "echo first; while read line; do echo \"line $line\"; done"
    argv = ctr.run_argv(id, "sh", "-c", script)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "first\n"
        client.kill()
        client.wait()
    try:
        time.sleep(0.3)
        assert ctr.status(id) == "RUNNING"
        attach = ["ctr", "-n", ctr.namespace, "task", "attach", id]
        with subprocess.Popen(attach, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write("again\n")
            client.stdin.flush()
            assert client.stdout.readline() == "line again\n"
            client.kill()
            client.wait()
    finally:
        ctr.remove(id)
        run(["sh", "-c", f"rm -rf /run/containerd/fifo/*/{id}-std* ; find /run/containerd/fifo -type d -empty -delete; true"])


def test_log_uri_of_a_file_takes_both_outputs(ctr: Ctr) -> None:
    path = f"/tmp/{ctr.new_id('log')}/deep/out.log"
    with ctr.running("sh", "-c", "echo out; echo err >&2; sleep 1000", flags=["--log-uri", f"file://{path}"]):
        eventually(lambda: sorted(open(path).read().splitlines()) == ["err", "out"])


def test_log_uri_of_a_binary_gets_both_outputs_and_its_arguments(ctr: Ctr) -> None:
    out = f"/tmp/{ctr.new_id('binlog')}"
    script = f"{out}.sh"
    with open(script, "w") as file:
        file.write(
            f'#!/bin/sh\nenv > {out}.env\necho "$@" > {out}.args\ncat <&3 > {out}.stdout 5>&- &\ncat <&4 > {out}.stderr 5>&- &\nexec 5>&-\nwait\n'
        )
    os.chmod(script, 0o755)
    uri = f"binary://{script}?key=value"
    with ctr.running("sh", "-c", "echo out; echo err >&2; sleep 1000", flags=["--log-uri", uri]) as id:
        eventually(lambda: open(f"{out}.stdout").read() == "out\n" and open(f"{out}.stderr").read() == "err\n")
        assert open(f"{out}.args").read() == "key value\n"
        environment = open(f"{out}.env").read()
        assert f"CONTAINER_ID={id}\n" in environment
        assert f"CONTAINER_NAMESPACE={ctr.namespace}\n" in environment


@pytest.mark.parametrize("count", [200])
def test_very_short_containers_end_every_time(count: int) -> None:
    ctr = Ctr()
    for _ in range(count):
        ctr.run("true")
