"""Exact command lines: what a runtime is called with."""

from __future__ import annotations

from pathlib import Path

import pytest

from kybernate_shim.oci.commands import Cli, Criu

B = Path("/b")
PID = B / "init.pid"
RUNC = Cli(Path("/bin/runc"), Path("/r/ns"), B / "log.json")
CRUN = Cli(Path("/bin/crun"), Path("/r/ns"), B / "log.json")
SOCKET = Path("/tmp/pty.sock")
CRIU = Criu(Path("/i"), Path("/w"))
ALL_CRIU = Criu(Path("/i"), Path("/w"), True, True, True, True, ("--manage-cgroups-mode", "ignore"))
GLOBAL = "--root /r/ns --log /b/log.json --log-format json"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (RUNC.create("c", B, PID), "create --bundle /b --pid-file /b/init.pid c"),
        (
            RUNC.create("c", B, PID, console_socket=SOCKET, no_pivot=True, no_new_keyring=True),
            "create --bundle /b --pid-file /b/init.pid --console-socket /tmp/pty.sock --no-pivot --no-new-keyring c",
        ),
        (RUNC.start("c"), "start c"),
        (RUNC.exec("c", B / "p.json", B / "e.pid"), "exec --process /b/p.json --detach --pid-file /b/e.pid c"),
        (
            RUNC.exec("c", B / "p.json", B / "e.pid", console_socket=SOCKET),
            "exec --process /b/p.json --console-socket /tmp/pty.sock --detach --pid-file /b/e.pid c",
        ),
        (RUNC.kill("c", 15), "kill c 15"),
        (RUNC.kill("c", 9, all=True), "kill --all c 9"),
        (RUNC.delete("c"), "delete c"),
        (RUNC.delete("c", force=True), "delete --force c"),
        (RUNC.pause("c"), "pause c"),
        (RUNC.resume("c"), "resume c"),
        (RUNC.update("c"), "update --resources - c"),
        (RUNC.checkpoint("c", CRIU, leave_running=False), "checkpoint --image-path /i --work-path /w c"),
        (
            RUNC.checkpoint("c", ALL_CRIU, leave_running=True, empty_ns=["network", "ipc"]),
            "checkpoint --image-path /i --work-path /w --tcp-established --ext-unix-sk --shell-job --file-locks "
            "--manage-cgroups-mode ignore --empty-ns network --empty-ns ipc --leave-running c",
        ),
        (
            RUNC.restore("c", B, PID, CRIU),
            "restore --image-path /i --work-path /w --detach --pid-file /b/init.pid --no-subreaper --bundle /b c",
        ),
        (
            RUNC.restore("c", B, PID, ALL_CRIU, console_socket=SOCKET, no_pivot=True),
            "restore --image-path /i --work-path /w --tcp-established --ext-unix-sk --shell-job --file-locks "
            "--manage-cgroups-mode ignore --detach --pid-file /b/init.pid --console-socket /tmp/pty.sock --no-pivot "
            "--no-subreaper --bundle /b c",
        ),
    ],
)
def test_runc_is_called_with(argv: list[str], expected: str) -> None:
    assert " ".join(argv) == f"/bin/runc {GLOBAL} {expected}"


def test_crun_is_spared_the_flags_that_it_lacks() -> None:
    assert " ".join(CRUN.checkpoint("c", CRIU, leave_running=True, empty_ns=["network"])) == (
        f"/bin/crun {GLOBAL} checkpoint --image-path /i --work-path /w --leave-running c"
    )
    assert " ".join(CRUN.restore("c", B, PID, CRIU, no_pivot=True)) == (
        f"/bin/crun {GLOBAL} restore --image-path /i --work-path /w --detach --pid-file /b/init.pid --bundle /b c"
    )


def test_global_flags_follow_the_cgroup_driver_and_the_log() -> None:
    assert Cli(Path("runc"), Path("/r"), systemd_cgroup=True).start("c") == [
        "runc",
        "--root",
        "/r",
        "--systemd-cgroup",
        "start",
        "c",
    ]
