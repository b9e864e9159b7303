"""What can go wrong at a restore, and what must hold afterwards.

A restore that failed has left no process, mount or cgroup behind, which the check after every test of this directory
looks for.
"""

# ruff: noqa: F811  # fixtures that are imported, and are arguments of tests
from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.node import Containerd
from tests.system.checkpoints import (
    PROMPTLY,
    PYTHON,
    counting,
    first,
    holding,
    kill,
    refused,
    restored,
    save,
)
from tests.system.ctr import Ctr, eventually, run
from tests.system.held import held_restore
from tests.system.leftovers import Snapshot
from tests.system.programs import script
from tests.system.restore_images import good, place, restore_refused  # noqa: F401  # fixtures

BIG = 512  # MiB: a restore that takes long enough to be hit in the middle


# -- programs that end ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with so much memory that a restore is far from done when CRIU begins to read it."""
    path = tmp_path_factory.mktemp("big") / "image"
    with holding(Ctr(), BIG) as witness:
        save(Ctr(), witness.id, path)
    return path


def restoring(ctr: Ctr, id: str, image: Path, *flags: str) -> list[str]:
    own = Ctr(ctr.runtime, ctr.namespace, PYTHON)
    return own.run_argv(id, "false", flags=["-d", "--annotation", f"kybernate.io/restore-from={image}", *flags])


@contextmanager
def new_id(ctr: Ctr) -> Iterator[str]:
    """Give an id for a restore that fails; what bears it must be quick to delete."""
    id = ctr.new_id("r")
    try:
        yield id
    finally:
        begin = time.monotonic()
        ctr.remove(id)
        took = time.monotonic() - begin
    assert took < PROMPTLY


@pytest.mark.parametrize("program", ["criu", "runc"])
def test_program_killed_in_the_middle_of_a_restore(ours: Ctr, big: Path, program: str) -> None:
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            kill(first(program))
        said = restore.result()
        assert "nothing is left of it" in said
        assert "restore.log" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_failing_runtime_at_restore_is_quoted(ours: Ctr, good: Path, shim_config: Path, tmp_path: Path) -> None:
    fails = script(
        tmp_path / "runc",  # an image is restored by the runtime that it was made with
        'case "$*" in *" restore "*) echo \'{"level":"error","msg":"no restore today"}\' >>"$4"; exit 1;; esac\n'
        'exec /usr/sbin/runc "$@"',
    )
    shim_config.write_text(f'runtime = "{fails}"\n')
    assert "no restore today" in restore_refused(ours, good)


def test_restored_processes_that_cannot_be_taken_over_are_ended(
    ours: Ctr, good: Path, shim_config: Path, tmp_path: Path
) -> None:
    """CRIU has succeeded, and nothing says what it has made."""
    forgets = script(
        tmp_path / "runc",
        'case "$*" in *" restore "*) ;; *) exec /usr/sbin/runc "$@";; esac\n'
        '/usr/sbin/runc "$@" || exit\n'
        'while [ "$1" != --pid-file ]; do shift; done\n'
        'rm "$2"',
    )
    shim_config.write_text(f'runtime = "{forgets}"\n')
    before = Snapshot.take()
    assert "init.pid" in restore_refused(ours, good)
    left = before.added(Snapshot.take())
    assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_deadline_of_a_restore(ours: Ctr, big: Path, shim_config: Path) -> None:
    shim_config.write_text("[deadlines]\nrestore = 1.5\n")
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            said = restore.result(30)
        assert "1.5 s" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_killed_container_does_not_wait_for_its_restore(ours: Ctr, big: Path) -> None:
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            ours("task", "kill", "-s", "SIGKILL", id, status=None)  # containerd may take it for one without processes
            said = restore.result(30)
        assert "ended: it was killed" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_removed_container_does_not_wait_for_its_restore(ours: Ctr, big: Path) -> None:
    """ctr sends no signal before: for containerd the task has no process yet."""
    before = Snapshot.take()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            ours("task", "rm", "--force", id)
            said = restore.result(30)
        assert "ended: it was killed" in said
        left = before.added(Snapshot.take())
        assert not {"containers", "cgroups", "runtime_state"} & left.keys(), left


def test_killed_daemon_during_a_restore_leaves_nothing(ours: Ctr, big: Path) -> None:
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            shim = first("runc").parent()
            assert shim is not None
            kill(shim)
        restore.result()
        eventually(lambda: ours.status(id) == "")


def test_killed_containerd_during_a_restore(ours: Ctr, big: Path) -> None:
    """containerd has forgotten that it asked for the start; whatever it finds, it can remove."""
    containerd = Containerd()
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            containerd.kill(signal.SIGKILL)
        restore.result()
        containerd.start()
        containerd.wait_ready()


def test_image_can_be_restored_after_a_failed_attempt(ours: Ctr, big: Path) -> None:
    """What a failed restore had begun does not stand in the way of the next one, of the same id."""
    log = Path(f"/tmp/{ours.new_id('log')}")
    with new_id(ours) as id:
        with held_restore(big, lambda: refused(*restoring(ours, id, big))) as restore:
            kill(first("criu"))
        restore.result()
    with restored(ours, big, log=log, container_image=PYTHON, id=id) as witness:
        witness.assert_goes_on()
    log.unlink()


# -- a cgroup that is another's -------------------------------------------------------------------------------------


def test_running_original_is_safe_from_a_restore_into_its_cgroup(ours: Ctr, place: Path) -> None:
    """As `ctr containers restore` asks for, whose new container has the configuration of the old one."""
    with counting(ours) as witness:
        save(ours, witness.id, place)
        cgroup = f"/{ours.namespace}/{witness.id}"
        said = restore_refused(ours, place, "--cgroup", cgroup)
        assert f"processes of another container are in cgroup {cgroup}" in said
        assert str(ours.pid(witness.id)) in said
        witness.assert_goes_on()
        again = place.parent / "again"
        save(ours, witness.id, again, exit=True)
        eventually(lambda: ours.status(witness.id) == "STOPPED")
        with restored(ours, again, log=witness.log, flags=["--cgroup", cgroup]) as back:
            back.assert_goes_on()


def test_of_two_restores_into_one_cgroup_the_second_is_refused(ours: Ctr, big: Path) -> None:
    cgroup = f"/{ours.namespace}/{ours.new_id('both')}"
    with new_id(ours) as id, new_id(ours) as second:
        with held_restore(big, lambda: run(restoring(ours, id, big, "--cgroup", cgroup))) as restore:
            said = refused(*restoring(ours, second, big, "--cgroup", cgroup))
            assert f"another restore into cgroup {cgroup} is in progress" in said
        restore.result()
        assert ours.status(id) == "RUNNING"
