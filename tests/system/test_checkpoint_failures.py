"""What can go wrong at a checkpoint, and what must hold afterwards.

A container whose checkpoint failed continues as before, frozen if it was frozen, and there is no half image.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.ttrpc import RpcError
from tests.lab.node import Containerd
from tests.system.checkpoints import (
    HOLDING,
    MANIFEST,
    PROMPTLY,
    PYTHON,
    VFORKING,
    Witness,
    assert_no_image,
    assert_whole,
    counting,
    failure_of,
    holding,
    in_background,
    in_the_middle,
    kill,
    refused,
    restored,
    save,
    shim_of,
    small_disk,
    working,
)
from tests.system.ctr import Ctr, eventually
from tests.system.programs import script

BIG = 512  # MiB: a dump that takes long enough to be hit in the middle
NEW_FILE = "os.open('/tmp/data', os.O_CREAT | os.O_WRONLY)"
MEMORY_FILE = "os.memfd_create('unseen')"
CORKED_SOCKET = """
import socket
kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
kept.connect(("127.0.0.1", 9))
kept.setsockopt(17, 1, 1)  # UDP_CORK
kept.send(b"half of a datagram")
"""


@pytest.fixture(params=["RUNNING", "PAUSED"])
def state(request: pytest.FixtureRequest) -> str:
    """What the container was when its checkpoint began, and must be when it has failed."""
    return str(request.param)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where an image shall be; nothing is there yet."""
    return tmp_path / "image"


def brought_to(ctr: Ctr, id: str, state: str) -> None:
    if state == "PAUSED":
        ctr("task", "pause", id)


def save_refused(ctr: Ctr, witness: Witness, place: Path, **request: Any) -> str:
    """Try to write an image, and return the error."""
    with pytest.raises(RpcError) as failure:
        save(ctr, witness.id, place, **request)
    return str(failure.value)


def assert_as_before(ctr: Ctr, witness: Witness, state: str, place: Path) -> None:
    """The container is in `state`, continues by its log, and nothing keeps a second checkpoint from success."""
    assert ctr.status(witness.id) == state
    if state == "PAUSED":
        witness.assert_stands_still()
        ctr("task", "resume", witness.id)
    witness.assert_goes_on()
    again = place.parent / "again"
    save(ctr, witness.id, again)
    assert_whole(again)
    witness.assert_goes_on()
    shutil.rmtree(again)


def writing(ctr: Ctr, file: str) -> AbstractContextManager[Witness]:
    """Run a counting container that has written 100 MiB to the descriptor that the expression `file` gives."""
    fill = f"import os\nfile = {file}\nfor _ in range(100): os.write(file, os.urandom(1 << 20))\n"
    return counting(ctr, "python3", "-c", fill + HOLDING, "0", image=PYTHON)


# -- the disk -------------------------------------------------------------------------------------------------------


def test_too_small_disk_is_named_before_anything_is_done(ours: Ctr, state: str, place: Path) -> None:
    with counting(ours) as witness, small_disk(place.parent / "disk", 4) as disk:
        brought_to(ours, witness.id, state)
        said = refused("kybernate", "checkpoint", witness.id, str(disk / "image"))
        assert "4 MiB free" in said
        assert not (disk / "image").exists()
        assert_as_before(ours, witness, state, place)


def test_disk_that_fills_up_while_criu_writes(ours: Ctr, state: str, place: Path) -> None:
    """Memory that no process has mapped is not foreseen."""
    with writing(ours, MEMORY_FILE) as witness, small_disk(place.parent / "disk", 100) as disk:
        brought_to(ours, witness.id, state)
        said = refused("kybernate", "checkpoint", witness.id, str(disk / "image"))
        assert "Error (criu" in said
        assert "dump.log" in said
        assert not (disk / "image").exists()
        assert_as_before(ours, witness, state, place)


def test_disk_without_room_for_a_changed_file(ours: Ctr, state: str, place: Path) -> None:
    """Which is looked for before the file is copied."""
    with writing(ours, NEW_FILE) as witness, small_disk(place.parent / "disk", 100) as disk:
        brought_to(ours, witness.id, state)
        said = refused("kybernate", "checkpoint", witness.id, str(disk / "image"))
        assert "to spare" in said
        assert f"container {witness.id} is {state.lower()}" in said
        assert not (disk / "image").exists()
        assert_as_before(ours, witness, state, place)


def test_full_disk_does_not_lose_a_container_that_was_to_end(ours: Ctr, place: Path) -> None:
    with writing(ours, NEW_FILE) as witness, small_disk(place.parent / "disk", 100) as disk:
        refused("kybernate", "checkpoint", "--exit", witness.id, str(disk / "image"))
        assert not (disk / "image").exists()
        assert_as_before(ours, witness, "RUNNING", place)


@pytest.mark.parametrize("inodes", [3, 12, 30])
def test_disk_that_can_hold_no_more_files(ours: Ctr, place: Path, inodes: int) -> None:
    """A tenant can take all inodes of a disk, while a checkpoint of another one makes its files there."""
    with counting(ours) as witness, small_disk(place.parent / "disk", 100, inodes=inodes) as disk:
        said = refused("kybernate", "checkpoint", "--exit", witness.id, str(disk / "image"))
        assert "No space left on device" in said
        assert not (disk / "image").exists()
        assert_as_before(ours, witness, "RUNNING", place)


def test_work_directory_that_cannot_be_written(ours: Ctr, state: str, place: Path, shim_config: Path) -> None:
    file = place.parent / "file"
    file.write_text("in the way")
    with counting(ours) as witness:
        brought_to(ours, witness.id, state)
        said = save_refused(ours, witness, place, work_path=str(file / "work"))
        assert "Not a directory" in said
        assert not place.exists()
        assert_as_before(ours, witness, state, place)


def test_image_is_not_overwritten(ours: Ctr, state: str, place: Path) -> None:
    with counting(ours) as witness:
        save(ours, witness.id, place)
        before = assert_whole(place)
        brought_to(ours, witness.id, state)
        said = save_refused(ours, witness, place)
        assert "contains a checkpoint image already" in said
        assert assert_whole(place) == before
        assert_as_before(ours, witness, state, place)


def test_failure_keeps_what_else_lies_in_the_directory(ours: Ctr, place: Path, shim_config: Path) -> None:
    """A directory of the user's may hold anything, and a failed checkpoint takes away its own files only."""
    shim_config.write_text("[deadlines]\ncheckpoint = 0.2\n")
    place.mkdir()
    (place / "notes.tar").write_text("mine")
    with holding(ours, 256) as witness:
        save_refused(ours, witness, place)
        assert [path.name for path in place.iterdir() if path.suffix != ".log"] == ["notes.tar"]
        witness.assert_goes_on()


# -- a vfork ----------------------------------------------------------------------------------------------------------


def vforking(ctr: Ctr, seconds: float) -> AbstractContextManager[Witness]:
    """Run a counting container whose init has a vfork in progress nearly always, each for so long, 0: forever."""
    return counting(ctr, "python3", "-c", VFORKING, str(seconds), image=PYTHON)


def test_container_is_not_caught_in_the_middle_of_a_vfork(ours: Ctr, state: str, place: Path) -> None:
    """CRIU would wait for a process that waits for its child, which CRIU has stopped."""
    with vforking(ours, 0.02) as witness:
        for image in (place / name for name in "abc"):
            brought_to(ours, witness.id, state)
            save(ours, witness.id, image)
            assert_whole(image)
            assert_as_before(ours, witness, state, place)
        with restored(ours, image, container_image=PYTHON, log=place.parent / "log") as again:
            again.assert_goes_on()


def test_vfork_that_does_not_end_is_named(ours: Ctr, state: str, place: Path) -> None:
    with vforking(ours, 0) as witness:
        brought_to(ours, witness.id, state)
        said = save_refused(ours, witness, place)
        assert re.search(r"it continues as before: python3\[\d+] and python3\[\d+], its child, have shared", said)
        assert not place.exists()
        assert ours.status(witness.id) == state
        if state == "PAUSED":
            witness.assert_stands_still()
            ours("task", "resume", witness.id)
        witness.assert_goes_on()


# -- programs that end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["criu", "runc"])
def test_program_killed_in_the_middle_of_a_dump(ours: Ctr, state: str, place: Path, program: str) -> None:
    with holding(ours, BIG) as witness:
        brought_to(ours, witness.id, state)
        with in_background(lambda: save(ours, witness.id, place)) as checkpoint:
            in_the_middle(place)
            kill(working(program, "" if program == "criu" else "checkpoint"))
            said = failure_of(checkpoint)
        assert "continues as before" in said
        assert "dump.log" in said
        assert not place.exists()
        assert_as_before(ours, witness, state, place)


def test_deadline_of_the_call(ours: Ctr, state: str, place: Path) -> None:
    with holding(ours, BIG) as witness:
        brought_to(ours, witness.id, state)
        begin = time.monotonic()
        said = save_refused(ours, witness, place, timeout_seconds=0.3)
        assert time.monotonic() - begin < PROMPTLY
        assert "0.3 s" in said
        assert "continues as before" in said
        assert not place.exists()
        assert_as_before(ours, witness, state, place)


def test_deadline_of_the_command_line(ours: Ctr, place: Path) -> None:
    with holding(ours, BIG) as witness:
        said = refused("kybernate", "checkpoint", "--timeout", "0.3", witness.id, str(place))
        assert "0.3 s" in said
        assert "is running" in said
        assert not place.exists()
        witness.assert_goes_on()


def test_deadline_of_the_configuration(ours: Ctr, place: Path, shim_config: Path) -> None:
    shim_config.write_text("[deadlines]\ncheckpoint = 0.3\n")
    with holding(ours, BIG) as witness:
        said = save_refused(ours, witness, place)
        assert "0.3 s" in said
        assert_no_image(place)
        assert ours.status(witness.id) == "RUNNING"
        witness.assert_goes_on()


def test_missing_criu_is_named(ours: Ctr, state: str, place: Path, shim_config: Path) -> None:
    shim_config.write_text('criu = "/nowhere/criu"\n')
    with counting(ours) as witness:
        brought_to(ours, witness.id, state)
        said = refused("kybernate", "checkpoint", witness.id, str(place))
        assert "/nowhere/criu" in said
        assert "install CRIU" in said
        assert not place.exists()
        assert ours.status(witness.id) == state


def test_old_criu_is_named_with_the_version_that_is_needed(
    ours: Ctr, place: Path, shim_config: Path, tmp_path: Path
) -> None:
    old = script(tmp_path / "old/criu", 'echo "Version: 3.17.1"')
    shim_config.write_text(f'criu = "{old}"\n')
    with counting(ours) as witness:
        said = refused("kybernate", "checkpoint", witness.id, str(place))
        assert "3.17.1" in said
        assert "4.1" in said
        assert not place.exists()
        witness.assert_goes_on()


def test_refusal_of_criu_is_quoted(ours: Ctr, state: str, place: Path) -> None:
    """It dumps no socket of UDP with half of a datagram, which it sees only once they are frozen."""
    with counting(ours, "python3", "-c", CORKED_SOCKET + HOLDING, "0", image=PYTHON) as witness:
        brought_to(ours, witness.id, state)
        said = refused("kybernate", "checkpoint", witness.id, str(place))
        assert "Error (criu" in said
        assert "Can't dump corked dgram socket" in said
        assert "dump.log" in said
        assert "continues as before" in said
        assert not place.exists()
        assert ours.status(witness.id) == state


# -- the container is killed, or the daemons ------------------------------------------------------------------------


def test_kill_does_not_wait_for_a_checkpoint(ours: Ctr, state: str, place: Path) -> None:
    with holding(ours, BIG) as witness:
        pid = ours.pid(witness.id)
        brought_to(ours, witness.id, state)
        with in_background(lambda: save(ours, witness.id, place)) as checkpoint:
            in_the_middle(place)
            begin = time.monotonic()
            ours("task", "kill", "-s", "SIGKILL", witness.id)
            eventually(lambda: not Path(f"/proc/{pid}").exists(), seconds=PROMPTLY)
            print(f"dead after {time.monotonic() - begin:.2f} s")
            said = failure_of(checkpoint)
        assert "killed" in said
        assert not place.exists()
        eventually(lambda: ours.status(witness.id) == "STOPPED")


def test_repeated_kills_during_a_checkpoint(ours: Ctr, place: Path) -> None:
    """A kubelet repeats its kill; the second one must not disturb the cleaning up after the first."""
    with holding(ours, BIG) as witness:
        with in_background(lambda: save(ours, witness.id, place)) as checkpoint:
            in_the_middle(place)
            for _ in range(5):
                ours("task", "kill", "-s", "SIGKILL", witness.id, status=None)
            failure_of(checkpoint)
        assert not place.exists()
        eventually(lambda: ours.status(witness.id) == "STOPPED")


def test_killed_containerd_during_a_checkpoint(ours: Ctr, place: Path) -> None:
    """The shim continues with the checkpoint, and containerd finds container and image when it is back."""
    containerd = Containerd()
    with holding(ours, BIG) as witness:
        with in_background(lambda: save(ours, witness.id, place)) as checkpoint:
            in_the_middle(place)
            containerd.kill(signal.SIGKILL)
            checkpoint.result(30)
        containerd.start()
        containerd.wait_ready()
        assert_whole(place)
        assert_as_before(ours, witness, "RUNNING", place)


def test_killed_daemon_during_a_checkpoint_takes_its_container_along(ours: Ctr, state: str, place: Path) -> None:
    with holding(ours, BIG) as witness:
        pid, shim = ours.pid(witness.id), shim_of(ours, witness.id)
        brought_to(ours, witness.id, state)
        with in_background(lambda: save(ours, witness.id, place)) as checkpoint:
            in_the_middle(place)
            kill(shim)
            said = failure_of(checkpoint)
        assert "the connection ended" in said
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        eventually(lambda: ours.status(witness.id) == "")
        assert not (place / MANIFEST).exists()
        said = refused("kybernate", "inspect", str(place))
        assert "not a finished checkpoint image" in said
