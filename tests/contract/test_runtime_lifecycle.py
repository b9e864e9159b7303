"""One contract for every OCI runtime: what the shim expects of create, start, exec, kill, delete and the rest."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from kybernate_shim.errors import Missing
from kybernate_shim.linux.cgroup.cgroup import Cgroup
from kybernate_shim.oci.commands import Cli
from kybernate_shim.oci.options import RuntimeOptions
from kybernate_shim.oci.runtime import RuntimeFailed
from kybernate_shim.oci.spec import edit_spec
from tests.contract.runtime_bench import (
    FOREVER,
    NAMESPACE,
    Bench,
    Run,
    alive,
    cgroups_of,
    fixture_bench,
    pipe,
    read_all,
    until_ended,
)

__all__ = ["fixture_bench"]
pytestmark = pytest.mark.root


def test_container_lives_from_create_to_delete(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        state = await b.state()
        assert (state["status"], state["pid"], state["id"]) == ("created", pid, b.id)
        await b.runtime.start(b.id)
        assert (await b.state())["status"] == "running"
        await b.runtime.kill(b.id, signal.SIGKILL)
        assert await b.status_of(pid) == 128 + signal.SIGKILL
        await b.until_state("stopped")
        await b.runtime.delete(b.id)
        with pytest.raises(Missing, match=r"does not exist|No such file"):
            await b.runtime.delete(b.id)

    bench(work)


def test_exit_status_is_that_of_the_process(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.run("sh", "-c", "exit 7")
        assert await b.status_of(pid) == 7

    bench(work)


def test_output_goes_to_the_given_descriptors_and_else_nowhere(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pipe() as out:
            pid = await b.run("sh", "-c", "readlink /proc/1/fd/0; readlink /proc/1/fd/2; echo end", fds={1: out[1]})
            assert await b.status_of(pid) == 0
            assert read_all(out) == "/dev/null\n/dev/null\nend\n"

    bench(work)


def test_created_container_can_be_deleted_without_a_start(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.create(*FOREVER)
        await b.runtime.delete(b.id)
        assert await b.status_of(pid) == 128 + signal.SIGKILL

    bench(work)


def test_delete_of_a_running_container_is_refused_unless_forced(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.run(*FOREVER)
        with pytest.raises(RuntimeFailed, match=r"^OCI runtime delete failed: .*stopped"):
            await b.runtime.delete(b.id)
        assert alive(pid)
        await b.runtime.delete(b.id, force=True)
        assert await b.status_of(pid) == 128 + signal.SIGKILL

    bench(work)


def test_what_the_runtime_does_not_know_is_told_apart(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pytest.raises(Missing, match=r"does not exist|No such file"):
            await b.runtime.delete(b.id)
        with pytest.raises(
            Missing, match=r"finished|not running|no such process|not found|does not exist|No such file"
        ):
            await b.runtime.kill(b.id, signal.SIGTERM)
        await b.runtime.delete(b.id, force=True)

    bench(work)


def test_signal_after_the_end_is_process_gone(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.run("true")
        assert await b.status_of(pid) == 0
        await b.until_state("stopped")
        with pytest.raises(
            Missing, match=r"finished|not running|no such process|not found|does not exist|No such file"
        ):
            await b.runtime.kill(b.id, signal.SIGTERM)

    bench(work)


def test_signal_number_reaches_the_process(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pipe() as out:
            script = "trap 'echo got; exit 3' USR1; echo ready; while :; do sleep 0.05; done"
            pid = await b.run("sh", "-c", script, fds={1: out[1]})
            assert await asyncio.to_thread(os.read, out[0], 100) == b"ready\n"
            await b.runtime.kill(b.id, signal.SIGUSR1)
            assert await b.status_of(pid) == 3
            assert read_all(out) == "got\n"

    bench(work)


def test_kill_all_reaches_children_in_the_hosts_pid_namespace(bench: Run) -> None:
    async def work(b: Bench) -> None:
        pid = await b.run("sh", "-c", "sleep 1000 & sleep 1000 & wait", own_pids=False)
        pids = await b.processes(3)
        await b.runtime.kill(b.id, signal.SIGKILL, all=True)
        assert await b.status_of(pid) == 128 + signal.SIGKILL
        await until_ended(*pids)

    bench(work)


def test_cgroup_has_init_and_execs(bench: Run) -> None:
    async def work(b: Bench) -> None:
        init = await b.run(*FOREVER)
        exec_ = await b.exec("e", *FOREVER)
        assert sorted(Cgroup.of(init).processes()) == sorted([init, exec_])

    bench(work)


def test_exec_has_its_own_output_and_status(bench: Run) -> None:
    async def work(b: Bench) -> None:
        await b.run(*FOREVER)
        with pipe() as out:
            pid = await b.exec("e", "sh", "-c", "echo from exec; exit 5", fds={1: out[1]})
            assert await b.status_of(pid) == 5
            assert read_all(out) == "from exec\n"

    bench(work)


def test_exec_of_a_missing_program_is_named_by_its_own_error(bench: Run) -> None:
    """Side by side, each call must carry the message of its own failure, and the good ones none."""

    async def work(b: Bench) -> None:
        await b.run(*FOREVER)
        calls = [b.exec(f"good{n}", "true") for n in range(3)] + [b.exec(f"bad{n}", f"/bin/no{n}") for n in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(pid, int) for pid in results[:3]), results
        for number, error in enumerate(results[3:]):
            assert isinstance(error, RuntimeFailed)
            assert error.verb == "exec"
            assert f"/bin/no{number}" in str(error)
        assert [await b.status_of(pid) for pid in results[:3] if isinstance(pid, int)] == [0, 0, 0]
        assert sorted(b.bundle.path.glob(".log*")) == []

    bench(work)


def test_pause_stops_the_processes_and_resume_lets_them_go_on(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pipe() as out:
            await b.run("sh", "-c", "while :; do echo tick; sleep 0.01; done", fds={1: out[1]})
            assert await asyncio.to_thread(os.read, out[0], 1)
            os.set_blocking(out[0], False)
            await b.runtime.pause(b.id)
            await b.until_state("paused")  # crun does not wait for the last process to stop
            os.read(out[0], 1 << 20)
            await asyncio.sleep(0.2)
            with pytest.raises(BlockingIOError):
                os.read(out[0], 1)
            await b.runtime.resume(b.id)
            await b.until_state("running")
            os.set_blocking(out[0], True)
            assert await asyncio.to_thread(os.read, out[0], 4) == b"tick"

    bench(work)


def test_update_changes_the_limits(bench: Run) -> None:
    async def work(b: Bench) -> None:
        await b.run(*FOREVER)
        await b.runtime.update(b.id, b'{"pids":{"limit":42}}')
        limits = [group / "pids.max" for group in cgroups_of(b.id) if (group / "pids.max").exists()]
        assert [limit.read_text() for limit in limits] == ["42\n"]

    bench(work)


def test_update_that_makes_no_sense_is_refused(bench: Run) -> None:
    async def work(b: Bench) -> None:
        await b.run(*FOREVER)
        with pytest.raises(RuntimeFailed, match=r"^OCI runtime update failed: .+"):
            await b.runtime.update(b.id, b'{"pids":')

    bench(work)


def test_create_with_a_missing_program_names_it_and_leaves_nothing(bench: Run) -> None:
    async def work(b: Bench) -> None:
        with pytest.raises(RuntimeFailed, match=r"^OCI runtime create failed: .*/bin/nope.*") as caught:
            await b.create("/bin/nope")
        assert caught.value.status
        await b.runtime.delete(b.id, force=True)

    bench(work)


def test_terminal_arrives_at_the_console_socket(bench: Run, tmp_path: Path) -> None:
    async def work(b: Bench) -> None:
        path = tmp_path / "pty.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(10)
            b.write_spec("sh", "-c", "test -t 0 && test -t 1 && echo a terminal; sleep 1000", terminal=True)
            await b.runtime.create(b.id, b.bundle, fds={}, console_socket=path)
            b.watch(b.bundle.init_pid())
            connection, _ = listener.accept()
        with connection:
            master = socket.recv_fds(connection, 100, 1)[1][0]
        await b.runtime.start(b.id)
        assert await asyncio.to_thread(os.read, master, 100) == b"a terminal\r\n"
        os.close(master)

    bench(work)


def test_edited_spec_is_what_the_container_gets(bench: Run) -> None:
    async def work(b: Bench) -> None:
        b.write_spec("sh", "-c", "echo $ADDED")
        edit_spec(b.bundle.path, lambda document: document["process"]["env"].append("ADDED=ü"))
        with pipe() as out:
            await b.runtime.create(b.id, b.bundle, fds={1: out[1]})
            pid = b.watch(b.bundle.init_pid())
            await b.runtime.start(b.id)
            assert await b.status_of(pid) == 0
            assert read_all(out) == "ü\n"

    bench(work)


def test_what_is_recorded_removes_the_container_without_a_daemon(bench: Run) -> None:
    async def work(b: Bench) -> None:
        cli = b.runtime.cli
        b.bundle.write_runtime(cli.binary, RuntimeOptions(), root=cli.root.parent, systemd_cgroup=False)
        await b.run(*FOREVER)
        recorded = Cli(Path(b.bundle.runtime()), Path(b.bundle.options()["root"]) / NAMESPACE, b.bundle.log)
        result = await b.children.run(recorded.delete(b.id, force=True), timeout=10)
        assert (result.status, result.stderr) == (0, "")
        with pytest.raises(Missing, match=r"does not exist|No such file"):
            await b.runtime.delete(b.id)

    bench(work)
