"""Operations on GPU state that a client cancels in each of their steps, on pretended GPUs, with an arena and without.

Whatever the step: the container computes on with the right numbers or is suspended as a whole, as the answer says; its
memory is on its GPU or in the arena; nothing is left over; and the next operation succeeds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate_shim.arena.memory import ArenaOwner, Memory
from tests.fakes.cuda import Gpus
from tests.system import gpu, named
from tests.system.checkpoints import assert_no_image, assert_whole, kybernate, save
from tests.system.ctr import Ctr, eventually
from tests.system.programs import CRIU, script

SIZE = 128 << 20
MIB = 16
WANTED = ["--annotation", "kybernate.io/arena=true"]
PLAIN: list[str] = []
SLOW = 10  # seconds for a GiB
MOMENTS = 5


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[Gpus]:
    with gpu.node_with_arena(SIZE) as gpus:
        yield gpus


@pytest.fixture
def gpus(node: Gpus) -> Iterator[Gpus]:
    yield node
    gpu.heal(node)
    (node.directory / "calls").unlink(missing_ok=True)
    gpu.kill_helpers()
    eventually(lambda: node.used() == [0, 0])
    assert Memory(SIZE).free() == SIZE
    kybernate("cuda", "state", "--pid", str(os.getpid()))


@pytest.fixture
def ctr(gpus: Gpus) -> Ctr:
    return Ctr()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "image"


ways = pytest.mark.parametrize("flags", [PLAIN, WANTED], ids=["plain", "arena"])


def in_arena(ctr: Ctr, id: str) -> int:
    return sum(one.size for one in Memory(SIZE).kept(ArenaOwner.of(ctr.pid(id))))


class Before:
    """What a computing container was before an operation, and must be after it was cancelled."""

    def __init__(self, ctr: Ctr, gpus: Gpus, container: gpu.Computing) -> None:
        self.ctr, self.gpus, self.container = ctr, gpus, container
        self.pid = ctr.pid(container.id)
        self.used, self.files = gpus.used_by(self.pid), gpu.open_files(self.pid)

    def is_back(self) -> None:
        """The container computes on its GPU, nothing is left over, and it can be suspended, resumed and saved."""
        self.computes()
        named.call(self.ctr, self.container.id, "Suspend")
        self.is_away()
        named.call(self.ctr, self.container.id, "Resume")
        self.computes()

    def computes(self) -> None:
        now = named.status(self.ctr, self.container.id, gpu=True)
        assert (now.phase, now.gpu, now.note) == ("", "attached", "")
        self.container.computes_on()
        assert self.gpus.used_by(self.pid) == self.used
        assert not gpu.noted_as_locked(self.pid)
        assert in_arena(self.ctr, self.container.id) == 0
        assert gpu.open_files(self.pid) == self.files

    def is_away(self) -> None:
        """The container is suspended as a whole."""
        now = named.status(self.ctr, self.container.id, gpu=True)
        assert (now.phase, now.gpu, now.suspended) == ("", "suspended", True)
        assert gpu.noted_as_locked(self.pid)
        self.container.stands_still()


@contextmanager
def held(gpus: Gpus, verb: str, pid: int) -> Iterator[Callable[[], None]]:
    """Have the driver stop in the next call of a verb for this process; yield what waits until it is there."""
    gpus.record()
    gpus.switch(f"{verb}:1:hold@{pid}")
    try:
        yield lambda: (eventually(lambda: any(one.name == verb and one.target == pid for one in gpus.calls())), None)[1]
    finally:
        gpus.switch("")


def cancel_in(ctr: Ctr, gpus: Gpus, id: str, verb: str, method: str, **fields: Any) -> tuple[str, BaseException | None]:
    """Cancel an operation while the driver is in a verb for its process; return how it has ended, and its error."""
    with held(gpus, verb, ctr.pid(id)) as reached, named.begun(ctr, id, method, "op-1", **fields) as work:
        reached()
        with named.in_background(lambda: named.cancel(ctr, id, "op-1")) as cancelling:
            eventually(lambda: named.status(ctr, id).cancelling or cancelling.done())
            gpus.switch("")  # the driver continues: no call of it can be stopped
            outcome = cancelling.result(60).ended.outcome
        return outcome, work.exception(60)


@ways
@pytest.mark.parametrize(("method", "verb"), [("Suspend", "lock"), ("Suspend", "checkpoint"), ("Resume", "restore")])
def test_container_that_is_killed_meanwhile_is_said_to_have_ended(
    ctr: Ctr, gpus: Gpus, method: str, verb: str, flags: list[str]
) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags) as container:
        if method == "Resume":
            named.call(ctr, container.id, "Suspend")
        with held(gpus, verb, ctr.pid(container.id)) as reached, named.begun(ctr, container.id, method, "op-1") as work:
            reached()
            ctr("task", "kill", "-s", "SIGKILL", container.id)
            gpus.switch("")
            error = str(work.exception(60))
        assert "has ended" in error
        assert "keeps running" not in error


@ways
@pytest.mark.parametrize("verb", ["lock", "checkpoint"])
def test_suspend_cancelled_in_a_step_of_the_driver(ctr: Ctr, gpus: Gpus, verb: str, flags: list[str]) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags) as container:
        before = Before(ctr, gpus, container)
        outcome, error = cancel_in(ctr, gpus, container.id, verb, "Suspend")
        assert outcome == "cancelled"
        assert "its processes keep running" in str(error)
        before.is_back()


@pytest.mark.parametrize(
    ("verb", "outcome", "flags"),
    [
        ("restore", "cancelled", PLAIN),
        ("unlock", "succeeded", PLAIN),
        ("restore", "cancelled", WANTED),
        ("unlock", "cancelled", WANTED),
    ],
    ids=["restore", "unlock", "restore arena", "give"],
)
def test_resume_cancelled_in_a_step_of_the_driver(
    ctr: Ctr, gpus: Gpus, verb: str, outcome: str, flags: list[str]
) -> None:
    """A process that is being unlocked is let run. The arena unlocks it first of all to give its memory back."""
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags) as container:
        before = Before(ctr, gpus, container)
        named.call(ctr, container.id, "Suspend")
        ended, error = cancel_in(ctr, gpus, container.id, verb, "Resume")
        assert ended == outcome
        if outcome == "cancelled":
            assert "it stays suspended" in str(error)
            before.is_away()
            named.call(ctr, container.id, "Resume")
        else:
            assert error is None
        before.is_back()


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        *[(verb, PLAIN) for verb in ("lock", "checkpoint", "restore", "unlock")],
        *[(verb, WANTED) for verb in ("checkpoint", "restore")],
    ],
    ids=["lock", "checkpoint", "restore", "unlock", "checkpoint arena", "restore arena"],
)
def test_checkpoint_cancelled_in_a_step_of_the_driver(
    ctr: Ctr, gpus: Gpus, place: Path, verb: str, flags: list[str]
) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags) as container:
        before = Before(ctr, gpus, container)
        outcome, error = cancel_in(ctr, gpus, container.id, verb, "Checkpoint", path=str(place))
        assert outcome == "cancelled"
        assert "there is no image, and the container is as before" in str(error)
        assert_no_image(place)
        before.is_back()
        save(ctr, container.id, place)
        assert_whole(place)
        before.computes()


@pytest.mark.parametrize(("flags", "exit"), [(PLAIN, True), (WANTED, False)], ids=["ending", "leaving, arena"])
def test_checkpoint_cancelled_in_its_dump(
    ctr: Ctr, gpus: Gpus, place: Path, shim_config: Path, flags: list[str], exit: bool
) -> None:
    settings = shim_config.read_text()
    waits = place.parent / "waits"
    program = script(
        place.parent / "criu/criu",
        f'case "$*" in *--version*) exec {CRIU} "$@";; *) touch {waits}; sleep 1000;; esac',
    )
    shim_config.write_text(f'criu = "{program}"\n{settings}')
    try:
        with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags) as container:
            before = Before(ctr, gpus, container)
            with named.save_begun(ctr, container.id, "op-1", place, exit=exit) as checkpoint:
                eventually(waits.exists, seconds=30)
                assert named.cancel(ctr, container.id, "op-1").ended.outcome == "cancelled"
                named.cancelled(checkpoint)
            assert_no_image(place)
            before.is_back()
    finally:
        shim_config.write_text(settings)


@ways
def test_checkpoint_of_a_suspended_container_is_cancelled(ctr: Ctr, gpus: Gpus, place: Path, flags: list[str]) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=flags) as container:
        before = Before(ctr, gpus, container)
        named.call(ctr, container.id, "Suspend")
        with named.save_begun(ctr, container.id, "op-1", place) as checkpoint:
            outcome = named.cancelled_or_done(ctr, container.id, "op-1")
            error = checkpoint.exception(60)
        assert (error is None) == (outcome == "succeeded")
        before.is_away()
        named.call(ctr, container.id, "Resume")
        before.is_back()


@pytest.fixture
def shim_config() -> Path:
    """The node's settings, which have the arena."""
    return gpu.CONFIG


@pytest.mark.parametrize("method", ["Suspend", "Resume", "Checkpoint"])
def test_operation_cancelled_at_any_moment(ctr: Ctr, gpus: Gpus, place: Path, method: str) -> None:
    """Several times one after the other, each a little later than the one before."""
    gpus.slow(SLOW)
    with gpu.computing(ctr, *gpu.command(mib=MIB), flags=WANTED) as container:
        before = Before(ctr, gpus, container)
        fields = {"path": str(place)} if method == "Checkpoint" else {}
        named.call(ctr, container.id, "Suspend")
        begin = time.monotonic()
        named.call(ctr, container.id, "Resume")
        seconds = (time.monotonic() - begin) * (2 if method == "Checkpoint" else 1)
        outcomes = []
        for number in range(MOMENTS):
            if method == "Resume" and not named.status(ctr, container.id).suspended:
                named.call(ctr, container.id, "Suspend")
            with named.begun(ctr, container.id, method, f"op-{number}", **fields) as work:
                time.sleep(number / MOMENTS * seconds)
                outcomes.append(named.cancelled_or_done(ctr, container.id, f"op-{number}"))
                work.exception(60)
            away = named.status(ctr, container.id).suspended
            assert away == {"Suspend": outcomes[-1] == "succeeded", "Resume": outcomes[-1] == "cancelled"}.get(
                method, False
            )
            (before.is_away if away else before.computes)()
            if method == "Suspend" and away:
                named.call(ctr, container.id, "Resume")
            if method == "Checkpoint" and outcomes[-1] == "succeeded":
                assert_whole(place)
                break
        print(outcomes)
        assert "cancelled" in outcomes
        if named.status(ctr, container.id).suspended:
            named.call(ctr, container.id, "Resume")
        gpus.slow(0)
        before.is_back()


def test_resume_that_waits_for_room_is_cancelled(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB)) as container:
        before = Before(ctr, gpus, container)
        named.call(ctr, container.id, "Suspend")
        with (
            gpus.occupied(0, leaving=1 << 20),
            named.begun(ctr, container.id, "Resume", "op-1", room_timeout_ms=600_000) as resume,
        ):
            assert named.cancel(ctr, container.id, "op-1").ended.outcome == "cancelled"
            assert "it stays suspended" in named.cancelled(resume)
        before.is_away()
        named.call(ctr, container.id, "Resume")
        before.is_back()


def test_repeated_suspend_is_one(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr, *gpu.command(mib=MIB)) as container:
        before = Before(ctr, gpus, container)
        with (
            held(gpus, "checkpoint", before.pid) as reached,
            named.begun(ctr, container.id, "Suspend", "op-1") as first,
        ):
            reached()
            again = {"operation": "op-1", "timeout_ms": 5000}
            with named.in_background(lambda: named.call(ctr, container.id, "Suspend", **again)) as second:
                time.sleep(0.1)
                assert not second.done()
                gpus.switch("")
                assert first.result(30) == second.result(30)
        assert named.call(ctr, container.id, "Suspend", operation="op-1") == first.result()
        last = named.status(ctr, container.id).last
        assert (last.operation, last.outcome, last.vram_bytes) == ("op-1", "succeeded", first.result().vram_bytes)
        named.call(ctr, container.id, "Resume", operation="op-2")
        before.is_back()
