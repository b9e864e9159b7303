"""Checkpoints and restores that a client cancels: the container continues, and the answer says what is true."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.ttrpc import Code, RpcError
from tests.system import named
from tests.system.checkpoints import (
    LOOP,
    PROMPTLY,
    PYTHON,
    Witness,
    assert_no_image,
    assert_whole,
    counting,
    dumps_sockets,
    failure_of,
    holding,
    in_the_middle,
    kill,
    restored,
    save,
    shim_of,
)
from tests.system.ctr import CommandFailed, Ctr, eventually, run
from tests.system.programs import CRIU, script

BIG = 1024  # MiB
HALF = BIG // 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "image"


@pytest.fixture
def criu_waits(tmp_path: Path, shim_config: Path) -> Path:
    """A CRIU that waits until this file is there, and makes the file next to it before that."""
    go = tmp_path / "go"
    tell = f'case "$*" in *--version*) ;; *) touch {go}.waits; until test -e {go}; do sleep 0.02; done ;; esac'
    program = script(tmp_path / "criu/criu", f'{tell}\nexec {CRIU} "$@"')
    shim_config.write_text(f'criu = "{program}"\n')
    return go


def assert_goes_on(ctr: Ctr, witness: Witness, place: Path, state: str = "RUNNING") -> None:
    """The container is as before, there is no image, and a second checkpoint succeeds."""
    assert_no_image(place)
    now = named.status(ctr, witness.id)
    assert (now.phase, now.operation, now.gpu) == ("", "", "attached")
    assert ctr.status(witness.id) == state
    if state == "PAUSED":
        witness.assert_stands_still()
        ctr("task", "resume", witness.id)
    witness.assert_goes_on()
    again = place.parent / "again"
    save(ctr, witness.id, again)
    assert_whole(again)
    witness.assert_goes_on()


@pytest.mark.parametrize(("state", "exit"), [("RUNNING", False), ("PAUSED", True)])
def test_cancelled_checkpoint_of_a_gigabyte(ours: Ctr, place: Path, state: str, exit: bool) -> None:
    with holding(ours, BIG) as witness:
        if state == "PAUSED":
            ours("task", "pause", witness.id)
        with named.save_begun(ours, witness.id, "op-1", place, exit=exit) as checkpoint:
            in_the_middle(place)
            begin = time.monotonic()
            reply = named.cancel(ours, witness.id, "op-1")
            print(f"undone after {time.monotonic() - begin:.2f} s")
            assert (reply.ended.outcome, reply.ended.state) == (
                "cancelled",
                f"container {witness.id} is {state.lower()}",
            )
            said = named.cancelled(checkpoint)
        assert "there is no image, and the container is as before" in said
        assert "was cancelled by uid 0 (pid" in said
        assert named.cancel(ours, witness.id, "op-1").ended.outcome == "cancelled"
        assert_goes_on(ours, witness, place, state)
        last, earlier = (found := named.status(ours, witness.id)).last, found.earlier
        assert (last.operation, last.outcome) == ("", "succeeded")
        assert (earlier[0].operation, earlier[0].outcome, earlier[0].error) == ("op-1", "cancelled", said)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 0.95])
def test_checkpoint_cancelled_at_any_moment(ours: Ctr, place: Path, share: float) -> None:
    with holding(ours, 128) as witness:
        begin = time.monotonic()
        save(ours, witness.id, place.parent / "first")
        seconds = time.monotonic() - begin
        with named.save_begun(ours, witness.id, "op-1", place) as checkpoint:
            time.sleep(share * seconds)
            outcome = named.cancelled_or_done(ours, witness.id, "op-1")
            print(f"{outcome} at {share:.0%} of {seconds:.2f} s")
            if outcome == "cancelled":
                named.cancelled(checkpoint)
        if outcome == "succeeded":
            checkpoint.result(60)
            assert_whole(place)
        else:
            assert_goes_on(ours, witness, place)


def test_second_cancel_and_a_kill_meanwhile(ours: Ctr, place: Path) -> None:
    with holding(ours, HALF) as witness:
        pid = ours.pid(witness.id)
        with named.save_begun(ours, witness.id, "op-1", place) as checkpoint:
            in_the_middle(place)
            with (
                named.in_background(lambda: named.cancel(ours, witness.id, "op-1")) as first,
                named.in_background(lambda: named.cancel(ours, witness.id)) as second,
            ):
                ours("task", "kill", "-s", "SIGKILL", witness.id)
                eventually(lambda: not Path(f"/proc/{pid}").exists(), seconds=PROMPTLY)
                for one in (first, second):
                    one.exception(30)  # an answer, whichever
            checkpoint.exception(30)
        assert_no_image(place)
        eventually(lambda: ours.status(witness.id) == "STOPPED")


def test_dump_that_does_not_end_is_cancelled(ours: Ctr, place: Path, criu_waits: Path) -> None:
    with counting(ours) as witness:
        with named.save_begun(ours, witness.id, "op-1", place) as checkpoint:
            eventually(lambda: criu_waits.with_name("go.waits").exists())
            assert named.status(ours, witness.id).step == "dump"
            assert named.cancel(ours, witness.id).ended.outcome == "cancelled"
            named.cancelled(checkpoint)
        criu_waits.touch()
        assert_goes_on(ours, witness, place)


def test_container_that_criu_itself_ends_is_not_cancelled_in_its_dump(ours: Ctr, place: Path, criu_waits: Path) -> None:
    with counting(ours) as witness:
        with named.save_begun(ours, witness.id, "op-1", place, exit=True, tcp="established") as checkpoint:
            eventually(lambda: criu_waits.with_name("go.waits").exists())
            with named.in_background(lambda: named.cancel(ours, witness.id, "op-1")) as cancelling:
                time.sleep(0.2)
                assert not cancelling.done()
                criu_waits.touch()
                assert cancelling.result(30).ended.outcome == "succeeded"
            checkpoint.result(30)
        assert_whole(place)
        eventually(lambda: ours.status(witness.id) == "STOPPED")


@pytest.mark.parametrize("network", [["--net-host"], []], ids=["of the host", "its own"])
@pytest.mark.parametrize("seconds", [0, 0.2], ids=["cancel", "deadline"])
def test_connections_outlive_a_dump_that_is_given_up(
    ours: Ctr, place: Path, network: list[str], seconds: float
) -> None:
    """A CRIU that is killed would leave them in repair mode, and its rules, which drop their packets, on the node."""
    if not dumps_sockets():
        pytest.skip("this CRIU dumps no sockets on this kernel")
    program = f"import os\nheld = [os.urandom(1 << 20) for _ in range({HALF})]\n{LOOP}"
    with counting(ours, "python3", "-c", program, image=PYTHON, flags=network) as witness:
        request = {"tcp": "established", "timeout_seconds": seconds}
        with named.save_begun(ours, witness.id, "op-1", place, **request) as checkpoint:
            if seconds:
                assert f"did not end within {seconds:g} s" in failure_of(checkpoint)
            else:
                in_the_middle(place)
                assert named.cancel(ours, witness.id, "op-1").ended.outcome == "cancelled"
                named.cancelled(checkpoint)
        assert_no_image(place)
        assert "drop" not in run(["nft", "list", "ruleset"])
        witness.assert_goes_on()
        save(ours, witness.id, place, tcp="established")
        assert_whole(place)
        witness.assert_goes_on()


def test_repeated_request_is_one_checkpoint(ours: Ctr, place: Path) -> None:
    """As of a client whose connection broke, while the first one still runs and afterwards."""
    with holding(ours, 128) as witness:
        request: dict[str, Any] = {"path": str(place), "rootfs_diff": True, "operation": "op-1"}
        with named.save_begun(ours, witness.id, "op-1", place) as first:
            second = named.call(ours, witness.id, "Checkpoint", **request, timeout_seconds=100)
            assert first.result(60) == second
        assert named.call(ours, witness.id, "Checkpoint", **request) == second
        assert_whole(place)
        last = named.status(ours, witness.id).last
        assert (last.operation, last.path, last.bytes) == ("op-1", str(place), second.bytes)
        assert (last.manifest_digest, last.frozen_ms) == (second.manifest_digest, second.frozen_ms)
        assert [step.name for step in last.steps][-1] == "manifest"
        with pytest.raises(RpcError) as taken:
            named.call(ours, witness.id, "Checkpoint", **request, exit=True)
        assert taken.value.code is Code.ALREADY_EXISTS
        witness.assert_goes_on()


def test_client_that_goes_away_finds_its_operation_again(ours: Ctr, place: Path, criu_waits: Path) -> None:
    with counting(ours) as witness:
        words = (
            "from tests.system import named; from tests.system.ctr import Ctr;"
            f"named.call(Ctr(), {witness.id!r}, 'Checkpoint', operation='op-1', path={str(place)!r})"
        )
        client = subprocess.Popen([sys.executable, "-c", words])
        eventually(lambda: criu_waits.with_name("go.waits").exists())
        client.send_signal(signal.SIGKILL)
        client.wait()
        assert named.status(ours, witness.id).operation == "op-1"
        criu_waits.touch()
        eventually(lambda: named.status(ours, witness.id).last.operation == "op-1")
        answer = named.call(ours, witness.id, "Checkpoint", operation="op-1", path=str(place))
        assert answer.manifest_digest == named.status(ours, witness.id).last.manifest_digest
        assert_whole(place)
        witness.assert_goes_on()


def test_restore_has_its_annotations_name_and_can_be_cancelled(ours: Ctr, place: Path, criu_waits: Path) -> None:
    go = criu_waits
    go.touch()
    with counting(ours) as witness:
        save(ours, witness.id, place)
    go.unlink()
    go.with_name("go.waits").unlink()
    id, log = ours.new_id("r"), place.parent / "log"
    flags = ["--annotation", f"kybernate.io/restore-from={place}", "--annotation", "kybernate.io/operation=op-2"]
    with named.in_background(
        lambda: Ctr(ours.runtime, ours.namespace).launch("false", id=id, flags=["--log-uri", f"file://{log}", *flags])
    ) as restore:
        eventually(lambda: go.with_name("go.waits").exists())
        now = named.status(ours, id)
        assert (now.operation, now.phase) == ("op-2", "restore")
        reply = named.cancel(ours, id, "op-2")
        assert (reply.ended.verb, reply.ended.outcome) == ("restore", "cancelled")
        error = restore.exception(30)
        assert isinstance(error, CommandFailed)
        assert "was cancelled by uid 0" in str(error)
    ours.remove(id)
    go.touch()
    with restored(ours, place, log=log) as again:
        again.assert_goes_on()
        assert named.status(ours, again.id).last.operation == ""


def test_killed_daemon_in_a_cancel_takes_its_container_along(ours: Ctr, place: Path) -> None:
    with holding(ours, HALF) as witness:
        pid, shim = ours.pid(witness.id), shim_of(ours, witness.id)
        with named.save_begun(ours, witness.id, "op-1", place) as checkpoint:
            in_the_middle(place)
            with named.in_background(lambda: named.cancel(ours, witness.id, "op-1")) as cancelling:
                kill(shim)
                cancelling.exception(30)
            failure_of(checkpoint)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        eventually(lambda: ours.status(witness.id) == "")
