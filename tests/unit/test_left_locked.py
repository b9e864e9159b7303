"""What a dead shim has left locked, off its GPUs or frozen: what counts as that, and what the report on a node does."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.node import health, left_locked
from kybernate_shim.config import Config
from kybernate_shim.gpu.errors import CudaUnavailable, cuda_call_unanswered
from kybernate_shim.gpu.helper_answers import CudaProcess, State, States
from kybernate_shim.linux.cgroup import cgroup as cgroups
from kybernate_shim.oci.bundle import Bundle, CleanupRecord

ONE, TWO, OTHER = 1 << 30, (1 << 30) + 1, (1 << 30) + 2  # beyond every pid that the kernel gives


@dataclass
class Driver:
    """Answers like CudaHelper. Processes that are `deaf` do not answer, and one that is `lost` cannot be restored."""

    state: dict[int, State] = field(default_factory=dict)
    deaf: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    asked: int = 0

    async def states(self, pids: Sequence[int], timeout: float = 1) -> States:
        self.asked += 1
        known = {pid: CudaProcess(pid, self.state[pid], 0) for pid in pids if pid in self.state.keys() - self.deaf}
        return States(known, {pid: cuda_call_unanswered("state", pid, 1) for pid in pids if pid in self.deaf})

    async def restore(self, pids: Sequence[int], timeout: float) -> None:
        self.state |= dict.fromkeys(set(pids) - self.lost, State.LOCKED)

    async def unlock(self, pids: Sequence[int], timeout: float) -> None:
        self.state |= dict.fromkeys(pids, State.RUNNING)


@dataclass
class Node:
    """The bundles of a node in a directory, cgroups of version 2 in another one, and its driver."""

    root: Path
    driver: Driver = field(default_factory=Driver)

    def container(
        self, id: str, *pids: int, frozen: bool = False, shim: Path | None = None, **cleanup_record: Any
    ) -> Path:
        """Have a container with these processes, whose shim has noted `remains`; return its cgroup."""
        cgroup = self.root / "cgroup" / id
        cgroup.mkdir(parents=True)
        (cgroup / "cgroup.procs").write_text("\n".join(map(str, pids)))
        (cgroup / "cgroup.events").write_text(f"populated 1\nfrozen {int(frozen)}\n")
        (cgroup / "cgroup.freeze").write_text("1" * frozen)
        (cgroup / "cgroup.kill").touch()
        bundle = self.root / "bundles" / "default" / id
        bundle.mkdir(parents=True)
        (bundle / "address").write_text(f"unix://{shim or self.root / 'nobody'}")
        Bundle(bundle).write_cleanup_record(CleanupRecord(cgroup=str(cgroup), **cleanup_record))
        return cgroup

    def find(self) -> list[tuple[str, dict[int, str], bool]]:
        found = left_locked.find(self.root / "bundles", self.root / "socket")
        assert {one.namespace for one in found} <= {"default"}
        return [(one.container, dict(one.states), one.whole) for one in found]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)

    @asynccontextmanager
    async def helper(socket: Path) -> AsyncIterator[Driver]:
        assert socket == tmp_path / "socket"
        yield node.driver

    monkeypatch.setattr(left_locked, "cuda_helper", helper)
    monkeypatch.setattr(left_locked, "holds_driver", lambda pid: pid in node.driver.state)
    monkeypatch.setattr(cgroups, "hierarchy_version", lambda: 2)
    return node


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Path]:
    """Where a shim listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "shim"))
        listener.listen()
        yield tmp_path / "shim"


# -- what counts -------------------------------------------------------------------------------------------------------


def test_processes_that_do_not_compute_are_found_by_the_drivers_word(node: Node) -> None:
    node.driver.state = {ONE: State.LOCKED, TWO: State.RUNNING, OTHER: State.CHECKPOINTED}
    node.container("a", ONE, TWO, locked_pids=(ONE, TWO))
    node.container("b", OTHER, locked_pids=(OTHER,))
    assert node.find() == [("a", {ONE: "locked"}, True), ("b", {OTHER: "checkpointed"}, True)]


def test_process_that_does_not_answer_is_unknown(node: Node) -> None:
    node.driver = Driver({ONE: State.LOCKED}, deaf={ONE})
    node.container("a", ONE, locked_pids=(ONE,))
    assert node.find() == [("a", {ONE: "unknown"}, True)]


def test_container_of_a_living_shim_is_left_alone(node: Node, shim: Path) -> None:
    node.driver.state = {ONE: State.LOCKED}
    node.container("a", ONE, shim=shim, phase="checkpoint", locked_pids=(ONE,), frozen=True)
    assert node.find() == []
    assert not node.driver.asked


def test_pid_that_another_container_has_got_is_not_the_noted_one(node: Node) -> None:
    """Also where the one's id, and so its cgroup's name, is a part of the other's."""
    node.driver.state = {ONE: State.LOCKED}
    node.container("web-1", ONE)
    node.container("web", locked_pids=(ONE,))
    node.container("1", locked_pids=(ONE,))
    assert node.find() == []


def test_process_in_a_cgroup_below_is_the_containers(node: Node) -> None:
    node.driver.state = {ONE: State.LOCKED}
    below = node.container("a", locked_pids=(ONE,)) / "below"
    below.mkdir()
    (below / "cgroup.procs").write_text(str(ONE))
    assert node.find() == [("a", {ONE: "locked"}, True)]


def test_cgroup_that_is_gone_has_no_process(node: Node) -> None:
    cgroup = node.container("a", ONE, locked_pids=(ONE,), phase="checkpoint")
    for file in cgroup.iterdir():
        file.unlink()
    cgroup.rmdir()
    assert node.find() == []


def test_record_without_a_cgroup_names_nobody(node: Node) -> None:
    """Of a container without processes yet, or by an older shim."""
    node.container("a", ONE)
    Bundle(node.root / "bundles/default/a").write_cleanup_record(CleanupRecord(locked_pids=(ONE,), phase="checkpoint"))
    assert node.find() == []


@pytest.mark.parametrize("phase", ["checkpoint", "restore", "suspend", "resume"])
def test_frozen_container_is_found_without_the_driver(node: Node, phase: str) -> None:
    """A frozen process does not answer, and a node without GPUs has no driver to ask."""
    node.container("a", ONE, TWO, phase=phase, frozen=True)
    assert node.find() == [("a", {ONE: "frozen", TWO: "frozen"}, True)]
    assert not node.driver.asked


def test_paused_container_is_not_frozen_by_an_operation(node: Node) -> None:
    node.container("a", ONE, frozen=True)
    assert node.find() == []


def test_paused_container_that_is_off_its_gpus_is_found(node: Node) -> None:
    node.container("a", ONE, locked_pids=(ONE,), frozen=True)
    assert node.find() == [("a", {ONE: "frozen"}, True)]


# -- what is done ------------------------------------------------------------------------------------------------------


def report(node: Node, monkeypatch: pytest.MonkeyPatch, *, fix: bool) -> list[tuple[str, str, str]]:
    """Return what the report says of GPU states."""
    place = SimpleNamespace(
        find=partial(left_locked.find, node.root / "bundles", node.root / "socket"),
        repair=partial(left_locked.repair, socket=node.root / "socket"),
    )
    monkeypatch.setattr(health, "left_locked", place)
    return [(one.verdict, one.found, one.advice) for one in health._left_locked(Config(), fix=fix)]


def test_report_changes_nothing_by_itself(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.driver.state = {ONE: State.LOCKED}
    cgroup = node.container("a", ONE, TWO, locked_pids=(ONE,))
    whole = "container a (namespace default): process 1073741824 is locked, and its shim is dead"
    advice = "`kybernate doctor --fix` resumes them"
    assert report(node, monkeypatch, fix=False) == [("bad", whole, advice)]
    assert node.driver.state == {ONE: State.LOCKED}
    assert (cgroup / "cgroup.freeze").read_text() == (cgroup / "cgroup.kill").read_text() == ""


def test_fix_brings_all_back_and_lets_them_compute(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.driver.state = {ONE: State.CHECKPOINTED, TWO: State.LOCKED, OTHER: State.LOCKED}
    node.container("a", ONE, TWO, locked_pids=(ONE, TWO))
    ((verdict, found, advice),) = report(node, monkeypatch, fix=True)
    assert (verdict, advice) == ("ok", "")
    assert found.endswith("its shim is dead: running again")
    assert node.driver.state == {ONE: State.RUNNING, TWO: State.RUNNING, OTHER: State.LOCKED}
    assert node.find() == []


def test_fix_thaws_before_it_asks_the_driver(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.driver = Driver({ONE: State.CHECKPOINTED}, deaf={ONE})
    cgroup = node.container("a", ONE, phase="checkpoint", locked_pids=(ONE,), frozen=True)
    thaw = cgroups.Cgroup.thaw

    def thawed(one: cgroups.Cgroup) -> None:
        thaw(one)
        node.driver.deaf.clear()

    monkeypatch.setattr(cgroups.Cgroup, "thaw", thawed)
    assert [verdict for verdict, _, _ in report(node, monkeypatch, fix=True)] == ["ok"]
    assert (cgroup / "cgroup.freeze").read_text() == "0"
    assert node.driver.state == {ONE: State.RUNNING}


def test_container_that_was_being_frozen_is_found_and_thawed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process cannot be frozen, and its shim was killed as it waited for that; the others do not run."""
    cgroup = node.container("a", ONE, TWO, phase="checkpoint")
    (cgroup / "cgroup.freeze").write_text("1")
    assert node.find() == [("a", {ONE: "frozen", TWO: "frozen"}, True)]
    assert [verdict for verdict, _, _ in report(node, monkeypatch, fix=True)] == ["ok"]
    assert (cgroup / "cgroup.freeze").read_text() == "0"


def test_fix_thaws_a_container_without_gpus(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = node.container("a", ONE, phase="checkpoint", frozen=True)
    assert [verdict for verdict, _, _ in report(node, monkeypatch, fix=True)] == ["ok"]
    assert (cgroup / "cgroup.freeze").read_text() == "0"
    assert not node.driver.asked


def test_what_does_not_come_back_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.driver = Driver({ONE: State.CHECKPOINTED}, lost={ONE})
    node.container("a", ONE, locked_pids=(ONE,))
    ((verdict, found, advice),) = report(node, monkeypatch, fix=True)
    assert (verdict, advice) == ("bad", "end the processes")
    assert found.endswith(f"its shim is dead; process {ONE} is checkpointed")


@pytest.mark.parametrize("frozen", [False, True])
def test_processes_that_are_not_whole_never_compute(node: Node, monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """A part of their memory is in a checkpoint image only: to compute on would be to compute with wrong numbers."""
    node.driver.state = {ONE: State.CHECKPOINTED}
    cgroup = node.container("a", ONE, phase="checkpoint", locked_pids=(ONE,), whole=False, frozen=frozen)
    ((verdict, found, advice),) = report(node, monkeypatch, fix=False)
    assert (verdict, advice) == ("bad", "`kybernate doctor --fix` ends them: they cannot be resumed")
    assert "a part of its memory is in an unfinished checkpoint" in found
    ((verdict, found, _),) = report(node, monkeypatch, fix=True)
    assert (verdict, found.rpartition(": ")[2]) == ("ok", "ended")
    assert (cgroup / "cgroup.kill").read_text() == "1"
    assert node.driver.state == {ONE: State.CHECKPOINTED}


def test_driver_that_does_not_tell_is_a_note(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def states(pids: Sequence[int], timeout: float = 1) -> States:
        raise CudaUnavailable("no CUDA helper")

    monkeypatch.setattr(node.driver, "states", states)
    node.container("a", ONE, locked_pids=(ONE,))
    ((verdict, found, _),) = report(node, monkeypatch, fix=True)
    assert (verdict, found) == (
        "note",
        "processes that a dead shim has left cannot be examined: no CUDA helper",
    )
