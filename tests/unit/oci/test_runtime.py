"""Runtime: exact calls, and failures in the words of the runtime that failed. The runner is a fake with a script."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.config import Deadlines
from kybernate_shim.errors import Missing
from kybernate_shim.linux.children import Finished, ProgramTimedOut
from kybernate_shim.oci.bundle import Bundle
from kybernate_shim.oci.commands import Cli, Criu
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.runtime import Runtime, RuntimeFailed, RuntimeTimedOut, runtime_environment

ENV = {"PATH": "/bin"}


@dataclass
class FakeRunner:
    """Answers every call alike, and keeps what it was called with.

    `says` goes to the log that the call names, as an error. `raises` is raised in place of an answer.
    """

    status: int = 0
    stdout: str = ""
    stderr: str = ""
    says: str = ""
    raises: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        fds: Mapping[int, int] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        cwd: Path | None = None,
        umask: int | None = None,
    ) -> Finished:
        targets = {number: str(Path(f"/proc/self/fd/{fd}").readlink()) for number, fd in (fds or {}).items()}
        self.calls.append(
            {
                "argv": list(argv),
                "env": env,
                "stdio": targets,
                "stdin": stdin,
                "timeout": timeout,
                "cwd": cwd,
                "umask": umask,
            }
        )
        if self.says:
            with Path(argv[argv.index("--log") + 1]).open("a") as stream:
                stream.write(json.dumps({"level": "error", "msg": self.says}) + "\n")
        if self.raises:
            raise self.raises
        return Finished(tuple(argv), self.status, self.stdout, self.stderr)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


def runtime(bundle: Bundle, runner: FakeRunner) -> Runtime:
    return Runtime(Cli(Path("/bin/runc"), Path("/r"), bundle.log), runner, ENV, Deadlines())


def words(call: dict[str, Any]) -> str:
    """The command line after the global flags."""
    return " ".join(call["argv"][call["argv"].index("--log-format") + 2 :])


Call = Callable[[Runtime, Bundle], Coroutine[Any, Any, Any]]
NO_FDS: dict[int, int] = {}
CRIU = Criu(Path("/i"), Path("/w"))
CALLS: dict[str, tuple[Call, str, float | None]] = {
    "create": (
        lambda r, b: r.create("c", b, fds=NO_FDS, options=RuntimeOptions(no_new_keyring=True)),
        "create --bundle {b} --pid-file {b}/init.pid --no-new-keyring c",
        120,
    ),
    "start": (lambda r, b: r.start("c"), "start c", 120),
    "exec": (
        lambda r, b: r.exec("c", b, "e", fds=NO_FDS),
        "exec --process {b}/e.process.json --detach --pid-file {b}/e.pid c",
        120,
    ),
    "kill": (lambda r, b: r.kill("c", 9, all=True), "kill --all c 9", 10),
    "delete": (lambda r, b: r.delete("c", force=True), "delete --force c", 30),
    "pause": (lambda r, b: r.pause("c"), "pause c", 30),
    "resume": (lambda r, b: r.resume("c"), "resume c", 30),
    "update": (lambda r, b: r.update("c", b"{}"), "update --resources - c", 30),
    "checkpoint": (
        lambda r, b: r.checkpoint("c", CRIU, leave_running=True),
        "checkpoint --image-path /i --work-path /w --leave-running c",
        3600,
    ),
    "restore": (
        lambda r, b: r.restore("c", b, CRIU, fds=NO_FDS),
        "restore --image-path /i --work-path /w --detach --pid-file {b}/init.pid --no-subreaper --bundle {b} c",
        1800,
    ),
}


@pytest.mark.parametrize("verb", CALLS)
def test_call_is_one_command_with_its_deadline(bundle: Bundle, verb: str) -> None:
    call, expected, deadline = CALLS[verb]
    runner = FakeRunner(stdout="{}")
    asyncio.run(call(runtime(bundle, runner), bundle))
    (made,) = runner.calls
    assert words(made) == expected.format(b=bundle.path)
    assert (made["timeout"], made["env"]) == (deadline, ENV)
    assert made["stdin"] == (b"{}" if verb == "update" else None)
    # A restore makes mount points, and hooks make files, whose modes the container sees.
    assert made["umask"] == (0o077 if verb == "checkpoint" else None)


@pytest.mark.parametrize("verb", CALLS)
def test_failure_carries_the_runtimes_own_words(bundle: Bundle, verb: str) -> None:
    runner = FakeRunner(status=1, says="exec: no such file", stderr="noise")
    with pytest.raises(RuntimeFailed) as caught:
        asyncio.run(CALLS[verb][0](runtime(bundle, runner), bundle))
    assert str(caught.value) == f"OCI runtime {verb} failed: exec: no such file"
    assert (caught.value.verb, caught.value.message, caught.value.status) == (verb, "exec: no such file", 1)


@pytest.mark.parametrize("verb", CALLS)
def test_no_log_but_the_shared_one_is_left(bundle: Bundle, verb: str) -> None:
    with pytest.raises(RuntimeFailed):
        asyncio.run(CALLS[verb][0](runtime(bundle, FakeRunner(status=1, says="x")), bundle))
    assert {entry.name for entry in bundle.path.iterdir()} <= {"log.json"}


@pytest.mark.parametrize("verb", ["create", "exec", "restore"])
def test_missing_descriptors_are_dev_null_and_given_ones_stay(bundle: Bundle, verb: str) -> None:
    runner = FakeRunner()
    read, write = os.pipe()
    pipe = str(Path(f"/proc/self/fd/{write}").readlink())
    fds = {1: write}
    calls: dict[str, Call] = {
        "create": lambda r, b: r.create("c", b, fds=fds),
        "exec": lambda r, b: r.exec("c", b, "e", fds=fds),
        "restore": lambda r, b: r.restore("c", b, CRIU, fds=fds),
    }
    try:
        asyncio.run(calls[verb](runtime(bundle, runner), bundle))
    finally:
        os.close(read)
        os.close(write)
    assert runner.calls[0]["stdio"] == {0: "/dev/null", 1: pipe, 2: "/dev/null"}


def test_terminal_leaves_the_runtimes_output_to_its_error_message(bundle: Bundle) -> None:
    runner = FakeRunner()
    asyncio.run(runtime(bundle, runner).create("c", bundle, fds=NO_FDS, console_socket=Path("/s")))
    assert runner.calls[0]["stdio"] == {}
    assert "--console-socket /s" in words(runner.calls[0])


def test_failure_without_a_log_tells_command_end_and_stderr(bundle: Bundle) -> None:
    runner = FakeRunner(status=139, stderr="\n".join(f"line {n}" for n in range(40)))
    with pytest.raises(RuntimeFailed) as caught:
        asyncio.run(runtime(bundle, runner).start("c"))
    message = str(caught.value)
    begin = f"OCI runtime start failed: `/bin/runc --root /r --log {bundle.log} --log-format json start c` ended with "
    assert message.startswith(begin + "status 139 (SIGSEGV): line 20\n")
    assert message.endswith("line 39")


def test_failure_without_a_word_says_so(bundle: Bundle) -> None:
    with pytest.raises(RuntimeFailed, match=r"ended with status 255 and wrote nothing$"):
        asyncio.run(runtime(bundle, FakeRunner(status=255)).start("c"))


def test_error_of_an_earlier_call_is_not_repeated(bundle: Bundle) -> None:
    bundle.log.write_text('{"level":"error","msg":"old"}\n')
    with pytest.raises(RuntimeFailed, match=r"and wrote nothing$"):
        asyncio.run(runtime(bundle, FakeRunner(status=1)).start("c"))


def test_calls_side_by_side_are_not_blamed_for_each_other(bundle: Bundle) -> None:
    runner = FakeRunner()
    driver = runtime(bundle, runner)
    asyncio.run(driver.kill("c", 15))
    asyncio.run(driver.kill("c", 15))
    logs = [call["argv"][call["argv"].index("--log") + 1] for call in runner.calls]
    assert len({*logs, str(bundle.log)}) == 3


def test_deadline_is_an_error_of_its_own_with_the_last_words(bundle: Bundle) -> None:
    runner = FakeRunner(raises=ProgramTimedOut(["/bin/runc", "start", "c"], 120), says="waiting for a hook")
    with pytest.raises(RuntimeTimedOut) as caught:
        asyncio.run(runtime(bundle, runner).start("c"))
    assert str(caught.value) == (
        "OCI runtime start failed: /bin/runc start c: killed, because it did not end within 120 s; "
        "it wrote: waiting for a hook"
    )


def test_killed_runtime_is_never_taken_for_a_missing_container(bundle: Bundle) -> None:
    runner = FakeRunner(raises=ProgramTimedOut(["runc"], 1), says="container does not exist")
    for call in (runtime(bundle, runner).kill("c", 9), runtime(bundle, runner).delete("c")):
        with pytest.raises(RuntimeTimedOut):
            asyncio.run(call)


def test_program_that_cannot_be_executed_is_named(bundle: Bundle) -> None:
    runner = FakeRunner(raises=PermissionError(13, "Permission denied"))
    with pytest.raises(RuntimeFailed, match="create failed: /bin/runc cannot be executed: Permission denied"):
        asyncio.run(runtime(bundle, runner).create("c", bundle, fds=NO_FDS))


@pytest.mark.parametrize(
    "said",
    [
        "os: process already finished",
        "container not running",
        "container does not exist",
        "kill container: No such process",
        "open pidfd: No such process",
        "container `c` is not running",
        "error opening file `/r/c/status`: No such file or directory",
        "container 'c' not found",
    ],
)
def test_signal_to_what_has_ended_is_process_gone(bundle: Bundle, said: str) -> None:
    with pytest.raises(Missing, match=re.escape(said)):
        asyncio.run(runtime(bundle, FakeRunner(status=1, says=said)).kill("c", 15))


def test_other_failures_of_kill_stay_failures(bundle: Bundle) -> None:
    with pytest.raises(RuntimeFailed, match="kill failed: permission denied"):
        asyncio.run(runtime(bundle, FakeRunner(status=1, says="permission denied")).kill("c", 15))


@pytest.mark.parametrize(
    "said",
    [
        "container does not exist",
        'container "c" does not exist',
        "cannot open directory '/r/c': No such file or directory",
        "error opening file `/r/c/status`: No such file or directory",
    ],
)
def test_container_that_the_runtime_does_not_know_is_missing(bundle: Bundle, said: str) -> None:
    with pytest.raises(Missing, match=re.escape(said)):
        asyncio.run(runtime(bundle, FakeRunner(status=1, says=said)).delete("c"))


def test_delete_of_a_running_container_stays_a_failure(bundle: Bundle) -> None:
    said = "cannot delete container c that is not stopped: running"
    with pytest.raises(RuntimeFailed, match=said):
        asyncio.run(runtime(bundle, FakeRunner(status=1, says=said)).delete("c"))


def test_environment_hides_systemds_socket_and_puts_criu_first() -> None:
    env = {"PATH": "/usr/bin", "NOTIFY_SOCKET": "/run/systemd/notify", "HTTP_PROXY": "x"}
    assert runtime_environment(env) == {"PATH": "/usr/bin", "HTTP_PROXY": "x"}
    assert runtime_environment(env, Path("/opt/criu/sbin/criu"))["PATH"] == "/opt/criu/sbin:/usr/bin"
    assert runtime_environment({}, Path("/opt/criu/sbin/criu")) == {"PATH": "/opt/criu/sbin"}
    assert "NOTIFY_SOCKET" in env
