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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.system.ctr import CommandFailed, Ctr, eventually

SIZE = "stty size 2>/dev/null"  # without a size yet an error, of which many would fill what no process reads


def test_output_is_the_containers(ctr: Ctr) -> None:
    assert ctr.run("echo", "hello") == "hello\n"


def test_stdout_and_stderr_stay_apart(ctr: Ctr) -> None:
    """With a pause, because containerd's own shim at times loses what is written just before the end."""
    argv = ctr.run_argv(ctr.new_id(), "sh", "-c", "echo out; echo err >&2; sleep 0.2", flags=["--rm"])
    done = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 0)])
def test_exit_code_is_passed_on(ctr: Ctr, script: str, status: int) -> None:
    # A shell that is pid 1 cannot kill itself with SIGKILL: the kernel protects init from its own namespace.
    ctr.run("sh", "-c", script, status=status)


@pytest.mark.parametrize("name", ["TERM", "SEGV", "USR1"])
def test_unhandled_signal_gives_128_and_its_number(ctr: Ctr, name: str) -> None:
    """In a shell's child: the kernel spares init itself all signals that it does not handle."""
    ctr.run("sh", "-c", f"sh -c 'kill -{name} $$'; exit $?", status=128 + signal.Signals[f"SIG{name}"])


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


@contextmanager
def on_a_terminal(
    argv: list[str], *, rows: int = 31, columns: int = 97
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a client whose stdio is a terminal of that size; yield it and the terminal's master."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    client = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        yield client, master
    except subprocess.TimeoutExpired as error:  # that it did not end says too little
        os.set_blocking(master, False)
        with suppress(OSError):
            error.add_note(f"its terminal shows: {os.read(master, 4096).decode(errors='replace')!r}")
        raise
    finally:
        client.kill()
        client.wait()
        os.close(master)


def read_until(fd: int, text: str, seconds: float = 20) -> str:
    """Read a terminal until it shows `text`, and return all that it showed."""
    seen, end = "", time.monotonic() + seconds
    while text not in seen:
        ready, _, _ = select.select([fd], [], [], max(0, end - time.monotonic()))
        assert ready, f"{text!r} did not come in {seconds:g} s; seen: {seen!r}"
        try:
            seen += os.read(fd, 4096).decode(errors="replace")
        except OSError:
            raise AssertionError(f"terminal closed before {text!r}; seen: {seen!r}") from None
    return seen


def test_terminal_is_one_and_follows_the_clients_size(ctr: Ctr) -> None:
    step = f'new=$({SIZE}); [ "$new" = "$old" ] || echo "$new"; old=$new'
    script = f'tty; old=; until [ "$old" = "42 120" ]; do {step}; done; exit 5'
    argv = ctr.run_argv(ctr.new_id(), "sh", "-c", script, flags=["--rm", "-t"])
    with on_a_terminal(argv) as (client, master):
        assert "/dev/pts/0" in read_until(master, "31 97")
        ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 42, 120, 0, 0))

        def ended() -> bool:  # the client begins to listen only after its first size has arrived
            client.send_signal(signal.SIGWINCH)
            return client.poll() is not None

        eventually(ended)
        read_until(master, "42 120")
        assert client.returncode == 5


def test_terminal_takes_input(ctr: Ctr) -> None:
    argv = ctr.run_argv(ctr.new_id(), "sh", flags=["--rm", "-t"])
    with on_a_terminal(argv) as (client, master):
        read_until(master, "#")
        os.write(master, b"echo $((6*7))\nexit 4\n")
        read_until(master, "42")
        assert client.wait(20) == 4


def test_exec_has_a_terminal_of_its_own(ctr: Ctr) -> None:
    with ctr.running("sleep", "1000") as id:
        script = f"tty; until [ \"$({SIZE})\" = '31 97' ]; do :; done; exit 6"
        with on_a_terminal(ctr.exec_argv(id, "sh", "-c", script, flags=["-t"])) as (client, master):
            read_until(master, "/dev/pts/0")
            assert client.wait(20) == 6


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
    """Output that comes while no process is attached waits in the FIFO, and input still reaches the container."""
    id = ctr.new_id()
    script = 'echo first; while read line; do echo "line $line"; done'
    argv = ctr.run_argv(id, "sh", "-c", script)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "first\n"
        client.kill()
        client.wait()
    try:
        time.sleep(0.3)
        assert ctr.status(id) == "RUNNING"
        attach = ["ctr", "-n", ctr.namespace, "task", "attach", id]
        with subprocess.Popen(
            attach, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write("again\n")
            client.stdin.flush()
            assert client.stdout.readline() == "line again\n"
            client.kill()
            client.wait()
    finally:
        ctr.remove(id)
        for fifo in Path("/run/containerd/fifo").glob(f"*/{id}-std*"):  # of the client that was killed
            fifo.unlink()
            with suppress(OSError):
                fifo.parent.rmdir()


def test_log_uri_of_a_file_takes_both_outputs(ctr: Ctr, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.log"
    with ctr.running("sh", "-c", "echo out; echo err >&2; sleep 1000", flags=["--log-uri", f"file://{path}"]):
        eventually(lambda: sorted(path.read_text().splitlines()) == ["err", "out"])


def test_log_uri_of_a_binary_gets_both_outputs_and_its_arguments(ctr: Ctr, tmp_path: Path) -> None:
    logger = tmp_path / "logger"
    logger.write_text(
        f'#!/bin/sh\ncd {tmp_path}\nenv > env\necho "$@" > args\n'
        "cat <&3 > stdout 5>&- &\ncat <&4 > stderr 5>&- &\nexec 5>&-\nwait\n"
    )
    logger.chmod(0o755)
    uri = f"binary://{logger}?key=value"
    with ctr.running("sh", "-c", "echo out; echo err >&2; sleep 1000", flags=["--log-uri", uri]) as id:
        eventually(lambda: (tmp_path / "stdout").read_text() == "out\n")
        eventually(lambda: (tmp_path / "stderr").read_text() == "err\n")
        assert (tmp_path / "args").read_text() == "key value\n"
        environment = (tmp_path / "env").read_text()
        assert f"CONTAINER_ID={id}\n" in environment
        assert f"CONTAINER_NAMESPACE={ctr.namespace}\n" in environment


@pytest.mark.timeout(900)
def test_two_hundred_very_short_containers_end_every_time(ours: Ctr) -> None:
    for _ in range(200):
        ours.run("true")
