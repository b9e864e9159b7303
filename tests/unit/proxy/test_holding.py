"""What is decided of a model and its queue, in every order of events."""

from __future__ import annotations

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kybernate.proxy import holding
from kybernate.proxy.holding import Drain, Held, Phase, Refuse, Release, Reopen, Suspend, Ticket, Wake
from kybernate.proxy.settings import Model, Queue

MODEL = Model("m", "http://h", container="c", concurrency=2, idle=10.0, drain=5.0, queue=Queue(5, 100, 60.0))


def held(phase: Phase, *tickets: Ticket, now: float = 0.0) -> Held:
    state = Held(MODEL)
    holding.moved(state, phase, now)
    for one in tickets:
        holding.arrived(state, one)
    return state


def ticket(id: int, deadline: float = inf, bytes: int = 1) -> Ticket:
    return Ticket(id, bytes, 0.0, deadline)


def test_decide_changes_nothing() -> None:
    state = held(Phase.AWAKE, ticket(1), ticket(2), ticket(3))
    assert holding.decide(state, 0.0) == holding.decide(state, 0.0) == [Release(1), Release(2)]


def test_first_request_wakes() -> None:
    assert holding.decide(held(Phase.ASLEEP, ticket(1)), 0.0) == [Wake()]
    assert holding.decide(held(Phase.WAKING, ticket(1)), 0.0) == []


def test_deadlines_are_kept_in_every_phase() -> None:
    for phase in Phase:
        state = held(phase, ticket(1, 9.0), ticket(2, 5.0), ticket(3))
        assert holding.next_time(state) <= 5.0
        refused = [
            one.id for one in holding.decide(state, 9.0) if isinstance(one, Refuse) and one.refusal.status == 504
        ]
        assert sorted(refused) == [1, 2]


def test_idle_model_is_drained_then_suspended() -> None:
    state = held(Phase.AWAKE)
    assert holding.next_time(state) == 10.0
    assert holding.decide(state, 10.0) == [Drain()]
    holding.moved(state, Phase.DRAINING, 10.0)
    assert holding.decide(state, 10.0) == []
    state.closed = True
    assert holding.decide(state, 10.0) == [Suspend()]
    state.elsewhere = 1
    assert holding.decide(state, 14.0) == []
    assert holding.decide(state, 15.0) == [Reopen(given_up=True)]


def test_request_undoes_a_drain_and_waits_for_a_suspend() -> None:
    assert holding.decide(held(Phase.DRAINING, ticket(1)), 0.0) == [Reopen(given_up=False)]
    assert holding.decide(held(Phase.SUSPENDING, ticket(1)), 0.0) == []


def test_model_that_makes_way_is_suspended_although_requests_wait() -> None:
    state = held(Phase.AWAKE, ticket(1))
    state.suspend_wanted = state.makes_way = True
    assert holding.decide(state, 0.0) == [Drain()]
    holding.moved(state, Phase.DRAINING, 0.0)
    state.closed = True
    assert holding.decide(state, 0.0) == [Suspend()]
    holding.moved(state, Phase.SUSPENDING, 0.0)
    holding.moved(state, Phase.ASLEEP, 1.0)
    assert holding.decide(state, 1.0) == [Wake()]


def test_model_in_use_is_never_idle() -> None:
    state = held(Phase.AWAKE)
    holding.began(state, 0.0)
    assert holding.next_time(state) == inf
    holding.ended(state, 100.0)
    assert holding.next_time(state) == 110.0


def test_failed_wake_is_not_tried_again_at_once() -> None:
    state = held(Phase.WAKING, ticket(1))
    holding.wake_failed(state, "no room", 0.0)
    (refuse,) = holding.decide(state, 0.0)
    assert isinstance(refuse, Refuse)
    assert (refuse.refusal.status, refuse.refusal.retry_after) == (503, 10.0)
    holding.left(state, 1)
    refusal = holding.offer(state, ticket(2), 4.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == ("wake_failed", 6.0)
    assert holding.offer(state, ticket(2), 10.0) is None


def test_model_that_is_suspended_with_requests_in_flight_is_woken() -> None:
    """By something else than the proxy: they would hang in processes that do not compute."""
    state = held(Phase.AWAKE)
    holding.began(state, 0.0)
    holding.moved(state, Phase.ASLEEP, 1.0)
    assert holding.decide(state, 1.0) == [Wake()]
    holding.wake_failed(state, "why", 2.0)
    assert holding.decide(state, 2.0) == []
    assert holding.next_time(state) == 12.0
    assert holding.decide(state, 12.0) == [Wake()]


def test_wake_that_failed_is_tried_again_at_once_when_its_container_is_gone() -> None:
    """What failed was to wake that one; the next wake makes it of its image."""
    state = held(Phase.WAKING, ticket(1))
    holding.wake_failed(state, "it has ended", 0.0)
    holding.moved(state, Phase.ABSENT, 1.0)
    assert holding.decide(state, 1.0) == [Wake()]
    holding.wake_failed(state, "nothing to make it of", 2.0, absent=True)
    assert all(isinstance(one, Refuse) for one in holding.decide(state, 2.0))


def test_request_that_waits_for_the_port_of_a_container_that_is_gone_wakes_it() -> None:
    state = held(Phase.AWAKE)
    holding.began(state, 0.0)
    holding.moved(state, Phase.ABSENT, 1.0)
    assert holding.decide(state, 1.0) == [Wake()]


def test_queue_is_bounded_by_count_and_bytes() -> None:
    state = held(Phase.ASLEEP, *(ticket(number) for number in range(5)))
    assert holding.offer(state, ticket(9), 0.0) is not None
    few = held(Phase.ASLEEP, ticket(1, bytes=99))
    assert holding.offer(few, ticket(2, bytes=1), 0.0) is None
    assert holding.offer(few, ticket(2, bytes=2), 0.0) is not None


class Life(RuleBasedStateMachine):
    """Any order of requests, ends, wakes, suspends and time, with the engine's part played here."""

    def __init__(self) -> None:
        super().__init__()
        self.state = held(Phase.ASLEEP)
        self.state.closed = True
        self.now = 0.0
        self.ids = iter(range(10**6))
        self.order: list[int] = []
        self.released: list[int] = []

    def settle(self) -> None:
        for _ in range(20):
            actions = holding.decide(self.state, self.now)
            if not actions:
                return
            for action in actions:
                self.carry_out(action)
        raise AssertionError(f"never settles: {actions}")

    def carry_out(self, action: holding.Action) -> None:
        state, now = self.state, self.now
        match action:
            case Release(id):
                holding.left(state, id)
                holding.began(state, now)
                self.released.append(id)
            case Refuse(id, _):
                holding.left(state, id)
            case Wake():
                assert state.phase == Phase.ASLEEP
                assert state.waiting or state.in_flight
                holding.moved(state, Phase.WAKING, now)
            case Drain():
                assert not state.waiting
                holding.moved(state, Phase.DRAINING, now)
                state.closed = True
            case Reopen(given_up):
                state.suspend_wanted = state.suspend_wanted and not given_up
                holding.moved(state, Phase.AWAKE, now)
            case Suspend():
                assert not state.in_flight
                assert not state.elsewhere
                assert state.closed
                holding.moved(state, Phase.SUSPENDING, now)

    @rule(bytes=st.integers(0, 60), patience=st.sampled_from([1.0, 30.0, inf]))
    def request(self, bytes: int, patience: float) -> None:
        one = Ticket(next(self.ids), bytes, self.now, self.now + patience)
        if holding.can_pass(self.state):
            holding.began(self.state, self.now)
        elif holding.offer(self.state, one, self.now) is None:
            self.order.append(one.id)
            holding.arrived(self.state, one)
        self.settle()

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @precondition(lambda self: self.state.in_flight)
    @rule()
    def request_ends(self) -> None:
        holding.ended(self.state, self.now)
        self.settle()

    @precondition(lambda self: self.state.waiting)
    @rule(data=st.data())
    def client_hangs_up(self, data: st.DataObject) -> None:
        holding.left(self.state, data.draw(st.sampled_from(sorted(self.state.waiting))))
        self.settle()

    @precondition(lambda self: self.state.phase == Phase.WAKING)
    @rule(well=st.booleans())
    def wake_ends(self, well: bool) -> None:
        if well:
            holding.moved(self.state, Phase.AWAKE, self.now)
        else:
            holding.wake_failed(self.state, "why", self.now)
        self.settle()

    @precondition(lambda self: self.state.phase == Phase.SUSPENDING)
    @rule(well=st.booleans())
    def suspend_ends(self, well: bool) -> None:
        holding.moved(self.state, Phase.ASLEEP if well else Phase.AWAKE, self.now)
        self.settle()

    @precondition(lambda self: self.state.phase in (Phase.AWAKE, Phase.DRAINING))
    @rule()
    def something_else_suspends_it(self) -> None:
        holding.moved(self.state, Phase.ASLEEP, self.now)
        self.settle()

    @precondition(lambda self: self.state.phase == Phase.AWAKE)
    @rule()
    def suspend_is_wanted(self) -> None:
        self.state.suspend_wanted = True
        self.settle()

    @invariant()
    def nothing_is_late_or_too_much(self) -> None:
        state = self.state
        assert state.in_flight <= MODEL.concurrency
        assert state.bytes == sum(one.bytes for one in state.waiting.values()) <= MODEL.queue.bytes
        assert len(state.waiting) <= MODEL.queue.count
        assert all(one.deadline > self.now for one in state.waiting.values())
        assert state.first_deadline == min((one.deadline for one in state.waiting.values()), default=inf)
        if state.phase == Phase.AWAKE and state.waiting:
            assert state.in_flight == MODEL.concurrency
        assert not (state.phase == Phase.ASLEEP and state.waiting)

    @invariant()
    def requests_are_released_in_order(self) -> None:
        assert self.released == sorted(self.released)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
