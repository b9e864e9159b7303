"""How the parts of a killed checkpoint or restore are found."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kybernate_shim.checkpoint import cleanup
from kybernate_shim.checkpoint.cleanup import Traces, plain_path, told_of
from kybernate_shim.errors import Failed
from tests.unit.checkpoint.hiding import HIDING


@pytest.mark.parametrize(
    ("cgroups_path", "plain"),
    [
        ("/default/c1", "default/c1"),
        ("kubepods-pod1.slice:cri-containerd:abc", "kubepods.slice/kubepods-pod1.slice/cri-containerd-abc.scope"),
        (
            "kubepods-burstable-pod1.slice:cri:abc",
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-abc.scope",
        ),
        ("system.slice::abc", "system.slice/abc.scope"),
    ],
)
def test_cgroup_is_found_by_either_form_of_its_path(cgroups_path: str, plain: str) -> None:
    assert plain_path(cgroups_path) == plain


def test_programs_are_found_by_the_file_that_they_were_given(tmp_path: Path) -> None:
    theirs, another = tmp_path / "theirs", tmp_path / "theirs-too"
    with started(theirs) as first, started(another) as second:
        assert told_of(theirs) == [first.pid]
        assert told_of(another) == [second.pid]
        first.kill()
        second.kill()


def test_program_in_the_midst_of_exec_is_found(tmp_path: Path) -> None:
    """The kernel shows no environment then. This one hardly does anything else."""
    again = 'exec sh -c "$0" "$0"'
    environment = {"CRIU_CONFIG_FILE": str(tmp_path / "file"), "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sh", "-c", again, again], env=environment) as program:
        looks = [told_of(tmp_path / "file") for _ in range(300)]
        program.kill()
    assert looks == [[program.pid]] * 300


def test_program_without_an_environment_is_another(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"], env={}) as program:
        assert told_of(tmp_path / "file") == []
        program.kill()


def test_processes_that_hide_their_environment_take_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them was once waited for, half a second long."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    hiding = [subprocess.Popen([sys.executable, "-c", HIDING], stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for process in hiding:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
        assert all(
            cleanup._look(process.pid, b"=x", cleanup._pid_namespace("self"), everywhere=True) is cleanup.Look.OTHER
            for process in hiding
        )
    finally:
        for process in hiding:
            process.kill()
            process.communicate()


def test_process_with_an_endless_environment_is_read_in_part(tmp_path: Path) -> None:
    """A file that is named behind the part that is read finds no process; one before it does."""
    first, last = tmp_path / "first", tmp_path / "last"
    large = {f"X{number}": "x" * 100_000 for number in range(15)}
    assert sum(map(len, large.values())) > cleanup.MOST_ENVIRONMENT
    environment = {"FIRST": str(first), "PATH": os.environ["PATH"], **large, "LAST": str(last)}
    with subprocess.Popen(["sleep", "60"], env=environment) as program:  # a shell would sort what it hands on
        assert (told_of(first), told_of(last)) == ([program.pid], [])
        program.kill()


def test_programs_are_ended_and_waited_for(tmp_path: Path) -> None:
    traces = Traces(tmp_path / "file", "/default/c", tmp_path, "work")
    with started(tmp_path / "file") as program:
        traces.end_programs()
        assert program.wait(5) == -9
    traces.end_programs()


def test_program_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces(tmp_path / "file", "/default/c", tmp_path, "work")
    with started(tmp_path / "file") as program:
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda pid, number: None)
            with pytest.raises(Failed, match=str(program.pid)):
                traces.end_programs(seconds=0.02)
        program.kill()


def started(configuration: Path) -> subprocess.Popen[bytes]:
    """Start a program whose environment names the file, and return once it runs."""
    program = subprocess.Popen(
        ["sh", "-c", "echo; exec sleep 60"],
        env={"CRIU_CONFIG_FILE": str(configuration), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"\n"
    return program


def busy_cgroup(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """Let the removal of a directory fail so often, as that of a cgroup whose processes are still ending."""
    left = iter(range(looks))
    removed = Path.rmdir

    def rmdir(self: Path) -> None:
        if next(left, None) is not None:
            raise OSError(errno.EBUSY, "busy", str(self))
        removed(self)

    monkeypatch.setattr(Path, "rmdir", rmdir)


def test_cgroup_of_processes_that_are_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "container/inner"
    inner.mkdir(parents=True)
    busy_cgroup(monkeypatch, looks=3)
    cleanup._remove_cgroup(inner.parent, time.monotonic() + 60)
    assert not inner.parent.exists()


def test_cgroup_that_stays_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "container").mkdir()
    busy_cgroup(monkeypatch, looks=10**9)
    with pytest.raises(Failed, match="container is still in use"):
        cleanup._remove_cgroup(tmp_path / "container", time.monotonic())
