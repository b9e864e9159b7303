"""The order and its undo against a driver in memory that fails wherever hypothesis says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.gpu import evidence
from kybernate_shim.gpu.errors import CudaError, CudaHelperLost, GpuPair, cuda_call_failed, cuda_call_unanswered
from kybernate_shim.gpu.helper_answers import ArenaMoved, CudaProcess, RoomComing, State, States
from kybernate_shim.gpu.sequence import Ahead, StepSeconds, bring_back, resume, suspend, undisturbed

MOVES = {
    "take": (State.LOCKED, State.LOCKED),
    "give": (State.LOCKED, State.LOCKED),
    "lock": (State.RUNNING, State.LOCKED),
    "checkpoint": (State.LOCKED, State.CHECKPOINTED),
    "restore": (State.CHECKPOINTED, State.LOCKED),
    "unlock": (State.LOCKED, State.RUNNING),
}
FAULTS = ("refused", "deadline", "deadline-after", "lost", "lost-after")


@dataclass
class MemoryHelper:
    """Answers like CudaHelper. `faults` maps the n-th call of all to what happens on one of its processes.

    `away` are the processes whose memory the arena has.
    """

    state: dict[int, State]
    faults: dict[int, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    away: set[int] = field(default_factory=set)

    async def states(self, pids: Sequence[int], timeout: float = 1) -> States:
        return States({pid: CudaProcess(pid, self.state[pid], 0) for pid in pids if pid in self.state}, {})

    async def lock(self, pids: Sequence[int], timeout: float) -> dict[int, float]:
        return await self._call("lock", pids)

    async def checkpoint(
        self, pids: Sequence[int], timeout: float, *, threads_stopped: bool = False
    ) -> dict[int, float]:
        return await self._call("checkpoint", pids)

    async def restore(self, pids: Sequence[int], timeout: float, pairs: Sequence[GpuPair] = ()) -> dict[int, float]:
        return await self._call("restore", pids)

    async def unlock(self, pids: Sequence[int], timeout: float) -> dict[int, float]:
        return await self._call("unlock", pids)

    async def warm(self, pids: Sequence[int], timeout: float) -> None:
        if self.faults.get(-1):
            raise CudaHelperLost("CUDA Warm: the helper ended")

    async def prefetch(self, pid: int, gpu: str, free_bytes: int, timeout: float, *, room_comes: bool = False) -> None:
        if self.faults.get(-1):
            raise CudaHelperLost("CUDA Prefetch: the helper ended")

    async def offload(self, pids: Sequence[int], timeout: float) -> ArenaMoved:
        await self._call("take", pids)
        return ArenaMoved(dict.fromkeys(pids, 1))

    async def reload(self, pids: Sequence[int], timeout: float, coming: RoomComing | None = None) -> ArenaMoved:
        moved = dict.fromkeys(self.away & set(pids), 1)
        await self._call("give", pids)
        return ArenaMoved(moved)

    def _carry_out(self, verb: str, pid: int) -> None:
        self.state[pid] = MOVES[verb][1]
        if verb == "take":
            self.away.add(pid)
        elif verb in ("give", "unlock"):
            self.away.discard(pid)

    async def _call(self, verb: str, pids: Sequence[int]) -> dict[int, float]:
        if not pids:
            return {}
        fault = self.faults.get(len(self.calls))
        self.calls.append(verb)
        await asyncio.sleep(0)
        legal, _ = MOVES[verb]
        victim = pids[-1]
        for pid in pids:
            assert self.state[pid] is legal, f"{verb} of a process that is {self.state[pid]}"
            if pid != victim or fault is None or fault.endswith("-after"):
                self._carry_out(verb, pid)
        done = tuple(pid for pid in pids if pid != victim)
        if fault == "refused":
            raise cuda_call_failed(verb, victim, "CUDA_ERROR_UNKNOWN", "unknown error", done=done)
        if fault and fault.startswith("deadline"):
            raise cuda_call_unanswered(verb, victim, 1, done=done)
        if fault:
            raise CudaHelperLost(f"CUDA {verb}: the helper ended")
        return dict.fromkeys(pids, 0.0)


LIMITS = StepSeconds(1, 1, 1, 1)
PIDS = [11, 12, 13]
one_fault = st.dictionaries(st.integers(-1, 4), st.sampled_from(FAULTS), max_size=1)
faults = st.dictionaries(st.integers(0, 5), st.sampled_from(FAULTS), max_size=3)


def fresh(state: State, faults: dict[int, str], *, away: bool = False) -> MemoryHelper:
    return MemoryHelper(dict.fromkeys(PIDS, state), faults, away=set(PIDS) if away else set())


def require_one_place(helper: MemoryHelper) -> None:
    """No process may compute whose memory is in the arena."""
    assert not [pid for pid in helper.away if helper.state[pid] is State.RUNNING]


def told(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def failure_of(helper: MemoryHelper, *, arena: bool) -> CudaError | None:
    """Suspend everything and return the error, if that is how it ends."""
    try:
        asyncio.run(suspend(helper, lambda: PIDS, LIMITS, arena=arena))  # type: ignore[arg-type]
    except CudaError as error:
        return error
    finally:
        require_one_place(helper)
    return None


@given(faults, st.booleans())
def test_failed_suspend_leaves_nobody_behind_unsaid(faults: dict[int, str], arena: bool) -> None:
    helper = fresh(State.RUNNING, faults)
    error = failure_of(helper, arena=arena)
    for pid, state in helper.state.items():
        if error is None:
            assert state is State.CHECKPOINTED
        else:
            assert state is State.RUNNING or f"process {pid} is {state.name.lower()}" in told(error)


@given(one_fault, st.booleans())
def test_suspend_with_one_fault_is_undone_completely(faults: dict[int, str], arena: bool) -> None:
    helper = fresh(State.RUNNING, faults)
    error = failure_of(helper, arena=arena)
    assert helper.away == (set(PIDS) if arena and error is None else set())
    assert set(helper.state.values()) == {State.CHECKPOINTED if error is None else State.RUNNING}
    assert error is None or told(error) == ""


@given(one_fault, st.booleans())
def test_failed_resume_leaves_nobody_locked(faults: dict[int, str], away: bool) -> None:
    helper = fresh(State.CHECKPOINTED, faults, away=away)
    ahead = [Ahead(pid, "GPU-1", 1) for pid in PIDS]
    try:
        asyncio.run(resume(helper, PIDS, limits=LIMITS, ahead=ahead))  # type: ignore[arg-type]
    except CudaError:
        assert set(helper.state.values()) in ({State.CHECKPOINTED}, {State.RUNNING})
    else:
        assert set(helper.state.values()) == {State.RUNNING}
    require_one_place(helper)


@given(st.lists(st.sampled_from([State.RUNNING, State.LOCKED, State.CHECKPOINTED]), min_size=1, max_size=4), one_fault)
def test_bring_back_works_from_every_mixture(states: list[State], faults: dict[int, str]) -> None:
    helper = MemoryHelper(dict(enumerate(states, start=1)), faults)
    assert asyncio.run(bring_back(helper, list(helper.state), LIMITS)) == []  # type: ignore[arg-type]
    assert set(helper.state.values()) == {State.RUNNING}


@given(st.integers(0, 12))
def test_suspend_cancelled_at_any_point_is_undone(steps: int) -> None:
    helper = fresh(State.RUNNING, {})

    async def main() -> bool:
        task = asyncio.create_task(suspend(helper, lambda: PIDS, LIMITS))  # type: ignore[arg-type]
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True

    finished = asyncio.run(main())
    expected = State.CHECKPOINTED if finished else State.RUNNING
    assert set(helper.state.values()) == {expected}


def test_all_are_locked_before_one_is_checkpointed() -> None:
    helper = fresh(State.RUNNING, {})
    looks = [[11], [11, 12], PIDS, PIDS]
    suspended = asyncio.run(suspend(helper, lambda: looks.pop(0), LIMITS))  # type: ignore[arg-type]
    assert helper.calls == ["lock", "lock", "lock", "checkpoint"]
    assert suspended.pids == PIDS


def test_look_at_locked_processes_that_keep_it_waiting_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon answers meanwhile, and the processes are unlocked in the end."""
    monkeypatch.setattr(evidence, "LOOK_SECONDS", 0.1)
    helper, waiting = fresh(State.RUNNING, {}), threading.Event()

    async def main() -> bool:
        asyncio.get_running_loop().call_later(1.0, waiting.set)
        looking = suspend(helper, lambda: PIDS, LIMITS, last_look=lambda pids: waiting.wait(10) and None)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError, match="could not be examined"):
            await looking
        return waiting.is_set()

    assert not asyncio.run(main())
    waiting.set()
    assert set(helper.state.values()) == {State.RUNNING}


def test_processes_that_never_stop_appearing_are_given_up_and_unlocked() -> None:
    helper = MemoryHelper({})

    def list_pids() -> list[int]:
        helper.state[len(helper.state) + 1] = State.RUNNING
        return list(helper.state)

    with pytest.raises(CudaError, match=r"kept initializing CUDA for 0\.05 s"):
        asyncio.run(suspend(helper, list_pids, StepSeconds(0.05, 1, 1, 1)))  # type: ignore[arg-type]
    assert set(helper.state.values()) == {State.RUNNING}


@pytest.mark.parametrize("fails", [False, True], ids=["it ends", "it fails"])
def test_cancelled_while_undisturbed_work_goes_on(fails: bool) -> None:
    """The work ends all the same; and its failure, which may say that nothing must continue, is not hidden."""
    done = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append(True)
        if fails:
            raise ValueError("bytes are lost")

    async def main() -> None:
        task = asyncio.ensure_future(undisturbed(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(ValueError if fails else asyncio.CancelledError):
        asyncio.run(main())
    assert done
