"""The rules of the arbiter, each a line of the table in docs/seats.md."""

from __future__ import annotations

from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest

from kybernate.seats.decide import decide
from kybernate.seats.matrix import read_matrix
from kybernate.seats.model import NEVER, Gpu, Request, Rules, Status, Suspend
from kybernate.seats.outcomes import begun, done, failed
from kybernate.seats.windows import Window
from tests.unit.seats.nodes import GIB, LONG, NOW, active, decided, gpus, seat, shown, state, waiting

SHARED = Rules(share_vram=True, reserve_bytes=GIB, idle_after=0)


def test_a_free_gpu_is_given() -> None:
    assert shown(waiting("a")) == ["wake a"]


def test_a_start_gets_room_first() -> None:
    new = seat("new", status=Status.FREE, requests=(Request(NOW, "start"),))
    assert shown(new) == ["start new"]
    assert shown(new, active("a", busy=False)) == ["suspend a"]


@pytest.mark.parametrize("mine", [(0,), (0, 1)])
@pytest.mark.parametrize("its", [(0,), (0, 1)])
def test_seats_whose_gpus_intersect_are_not_active_together(mine: tuple[int, ...], its: tuple[int, ...]) -> None:
    assert shown(waiting("a", *mine), active("b", *its, since=1)) == []


def test_seats_of_other_gpus_are_not_touched() -> None:
    assert shown(waiting("a", 0), active("b", 1)) == ["wake a"]


def test_higher_priority_preempts_by_suspending() -> None:
    found = decided(waiting("high", priority=10), active("low", since=6)).actions
    assert found == (Suspend("low", "high has a higher priority", again=True),)


def test_lower_priority_waits_for_what_is_at_work() -> None:
    found = decided(waiting("low", ago=1), active("high", priority=10))
    assert found.actions == ()
    assert found.turns["low"].before == ("high",)


def test_everyone_is_active_within_the_bound_on_waiting() -> None:
    rules = Rules(maximum_wait=60)
    assert shown(waiting("low", ago=59), active("high", priority=10), rules=rules) == []
    assert shown(waiting("low", ago=60), active("high", priority=10), rules=rules) == ["suspend high"]
    assert shown(waiting("low", ago=61), waiting("other", ago=5, priority=20), rules=rules) == ["wake low"]


def test_what_has_waited_too_long_keeps_its_gpus_from_others() -> None:
    rules = Rules(maximum_wait=60)
    seats = (waiting("wide", 0, 1, ago=61), active("a", 0, since=1), waiting("b", 1, ago=10))
    assert shown(*seats, rules=rules) == []
    assert decided(*seats, rules=rules).turns["b"].before == ("wide",)


def test_a_seat_stays_for_the_minimum_residency() -> None:
    high = waiting("high", priority=10)
    found = decided(high, active("low", since=4))
    assert (found.actions, found.turns["high"].at) == ((), NOW + 1)
    assert shown(high, active("low", since=5)) == ["suspend low"]
    fresh = active("low", since=2, busy=False)
    assert shown(waiting("a"), fresh) == []  # it has not worked yet
    assert shown(waiting("a"), replace(fresh, idle_since=NOW - 1)) == ["suspend low"]


def test_waiting_requests_of_one_seat_are_served_together() -> None:
    """ABCABC becomes AABBCC: two requests of a seat are one turn, and it keeps its GPU while it is at work."""
    order = []
    seats = [seat(name, requests=(Request(NOW - 6 + n), Request(NOW - 3 + n))) for n, name in enumerate("abc")]
    now, node = NOW, state(*seats)
    while node.waiting:
        (action,) = decide(node, now).actions
        node = begun(node, action, now)
        assert decide(node, now).actions == ()
        ended = done(node.seats[action.seat], now)
        if ended.status == Status.ACTIVE:
            order.append(ended.name)
            assert ended.requests == ()
            assert decide(node.with_seat(replace(ended, busy=True)), now + 6).actions == ()  # it serves both
        node = node.with_seat(ended)
        now += 6
    assert order == ["a", "b", "c"]


def test_programs_of_one_priority_share_by_time_slices() -> None:
    rules = Rules(slice=30, maximum_wait=LONG)
    assert shown(waiting("a", ago=20), active("b", since=29), rules=rules) == []
    assert shown(waiting("a", ago=20), active("b", since=30), rules=rules) == ["suspend b"]


def test_a_pause_in_its_work_makes_room_for_a_waiting_seat() -> None:
    paused = active("b", since=6, busy=False)
    assert shown(waiting("a"), replace(paused, idle_since=NOW - 0.4)) == []
    assert shown(waiting("a"), replace(paused, idle_since=NOW - 0.5)) == ["suspend b"]


def test_idle_seats_are_suspended() -> None:
    quiet = active("a", busy=False)
    assert shown(replace(quiet, idle_since=NOW - 299)) == []
    assert shown(replace(quiet, idle_since=NOW - 300)) == ["suspend a"]
    assert shown(replace(quiet, idle_since=NOW - LONG), rules=Rules(idle_after=0)) == []


def test_a_seat_at_work_is_not_idle() -> None:
    assert shown(active("a", busy=True)) == []


def test_an_idle_seat_that_is_expected_soon_stays() -> None:
    assert shown(active("a", busy=False, expected_use=NOW + 2, wake_seconds=2)) == []
    assert shown(active("a", busy=False, expected_use=NOW + 200, wake_seconds=2)) == ["suspend a"]


def test_vram_is_shared_as_far_as_it_fits() -> None:
    seats = (waiting("a", need_bytes=40 * GIB), active("b", need_bytes=38 * GIB, since=1))
    free = gpus(1, 80 * GIB)
    assert shown(*seats, rules=SHARED, gpus=free) == ["wake a"]
    assert shown(*seats, rules=replace(SHARED, reserve_bytes=3 * GIB), gpus=free) == []
    assert shown(*seats, rules=Rules(), gpus=free) == []


def test_a_seat_of_unknown_size_shares_with_none() -> None:
    assert shown(waiting("a"), active("b", need_bytes=GIB, since=1), rules=SHARED) == []
    assert (
        shown(waiting("a", need_bytes=GIB), active("b", need_bytes=GIB, since=1, may_share=False), rules=SHARED) == []
    )


def test_the_seat_that_is_cheapest_to_bring_back_is_evicted() -> None:
    soon = active("soon", need_bytes=30 * GIB, busy=False, expected_use=NOW + 10, wake_seconds=2)
    late = active("late", need_bytes=30 * GIB, busy=False, expected_use=NOW + 1000, wake_seconds=2)
    dear = active("dear", need_bytes=19 * GIB, busy=False, expected_use=NOW + 10, wake_seconds=60)
    new = waiting("new", need_bytes=25 * GIB)
    assert shown(new, soon, late, dear, rules=SHARED, gpus=gpus(1)) == ["suspend late"]
    both = waiting("new", need_bytes=55 * GIB)
    assert shown(both, soon, late, dear, rules=SHARED, gpus=gpus(1)) == ["suspend late", "suspend soon"]


MATRIX = read_matrix(
    {"vars": {"g": "gemma", "q": "qwen", "e": "embed"}, "evict_costs": {"q": 10}, "sets": {"s": "(g | q) & e"}}
)


def test_the_matrix_says_which_are_active_together() -> None:
    rules = Rules(matrix=MATRIX, idle_after=0)
    assert shown(waiting("embed", 0), active("qwen", 1), rules=rules) == ["wake embed"]
    assert shown(waiting("gemma", 0), active("qwen", 1, busy=False), rules=rules) == ["suspend qwen"]
    assert shown(waiting("other", 0), active("qwen", 1, busy=False), rules=rules) == ["wake other"]


def test_the_window_decides_which_kind_comes_first() -> None:
    """2027-01-15 08:00 UTC is Friday 09:00 in Berlin."""
    day = Window(frozenset(range(5)), 9 * 60, 20 * 60, "inference")
    seats = (waiting("serve", kind="inference"), active("train", kind="training", priority=5, since=6))
    berlin = Rules(windows=(day,), zone=ZoneInfo("Europe/Berlin"))
    assert shown(*seats, rules=berlin) == ["suspend train"]
    assert shown(*seats, rules=Rules(windows=(day,))) == []


def test_ram_pressure_parks_the_coldest() -> None:
    warm = seat("warm", need_bytes=6 * GIB, expected_use=NOW + 60)
    cold = seat("cold", need_bytes=6 * GIB, expected_use=NOW + 600)
    assert shown(warm, cold, ram_free_bytes=3 * GIB) == ["park cold"]
    assert shown(warm, cold, ram_free_bytes=5 * GIB) == []
    assert shown(warm, replace(cold, status=Status.PARKING), ram_free_bytes=3 * GIB) == []
    assert shown(warm, replace(cold, parkable=False), ram_free_bytes=3 * GIB) == ["park warm"]


def test_a_park_that_fails_delays_no_wake() -> None:
    left = failed(seat("a", status=Status.PARKING, need_bytes=6 * GIB), NOW, Rules())
    assert shown(left, ram_free_bytes=3 * GIB) == []
    assert shown(replace(left, park_at=NOW), ram_free_bytes=3 * GIB) == ["park a"]
    assert shown(replace(left, requests=(Request(NOW),)), ram_free_bytes=3 * GIB) == ["wake a"]
    assert left.failures == 0  # those are of its wakes


def test_a_suspend_needs_room_in_ram_first() -> None:
    seats = (waiting("a"), active("b", need_bytes=20 * GIB, busy=False), seat("cold", 1, need_bytes=30 * GIB))
    assert shown(*seats, ram_free_bytes=10 * GIB) == ["park cold"]
    assert shown(*seats, ram_free_bytes=24 * GIB) == ["suspend b"]


def test_seats_that_wait_do_not_keep_host_memory_from_a_turn() -> None:
    a, last = waiting("a", need_bytes=6 * GIB), waiting("last", 1, ago=1, need_bytes=6 * GIB)
    there = (active("b", need_bytes=6 * GIB, busy=False), active("c", 1, need_bytes=6 * GIB, since=NOW - 1))
    assert shown(a, last, *there, ram_free_bytes=5 * GIB) == ["park last"]
    assert shown(a, replace(last, status=Status.PARKED), *there, ram_free_bytes=11 * GIB) == ["suspend b"]
    assert shown(a, last, ram_free_bytes=3 * GIB) == ["wake a", "wake last"]


def test_a_parked_seat_wakes() -> None:
    assert shown(waiting("a", status=Status.PARKED)) == ["wake a"]


def test_a_parked_seat_comes_through_host_memory() -> None:
    parked, cold = waiting("a", status=Status.PARKED, need_bytes=20 * GIB), seat("cold", 1, need_bytes=30 * GIB)
    assert shown(parked, cold, ram_free_bytes=10 * GIB) == ["park cold"]
    assert shown(parked, cold, ram_free_bytes=24 * GIB) == ["wake a"]
    assert shown(parked, ram_free_bytes=10 * GIB) == ["wake a"]  # nothing makes room: the shim decides
    parked = replace(parked, parked_bytes=18 * GIB)
    assert shown(parked, cold, arena_free_bytes=17 * GIB) == ["park cold"]
    assert shown(parked, replace(cold, requests=(Request(NOW),)), arena_free_bytes=17 * GIB) == ["park cold"]
    assert shown(parked, cold, arena_free_bytes=18 * GIB) == ["wake a"]


def test_room_counts_once_nvml_shows_it() -> None:
    left = seat("left", need_bytes=70 * GIB, held_bytes=70 * GIB, since=0)
    new = waiting("new", need_bytes=60 * GIB)
    full = (Gpu(0, 80 * GIB, 10 * GIB),)
    found = decided(left, new, gpus=full)
    assert (found.actions, found.turns["new"].before) == ((), ("left",))
    assert shown(replace(left, held_bytes=0), new, gpus=gpus(1)) == ["wake new"]


def test_room_is_claimed_before_a_wake_begins() -> None:
    first, second = waiting("first", need_bytes=50 * GIB, ago=9), waiting("second", need_bytes=50 * GIB)
    assert shown(first, second, gpus=gpus(1)) == ["wake first"]
    started = replace(first, status=Status.WAKING, requests=first.requests)
    assert shown(started, second, gpus=gpus(1)) == []
    assert shown(started, second, gpus=gpus(1), rules=SHARED) == []


def test_memory_of_other_processes_blocks_only_its_own_seat() -> None:
    taken = (Gpu(0, 80 * GIB, 10 * GIB),)
    found = decided(waiting("big", need_bytes=60 * GIB, ago=9), waiting("small", need_bytes=GIB), gpus=taken)
    assert [one.seat for one in found.actions] == ["small"]
    assert "processes without a seat" in found.turns["big"].reason


def test_a_failed_wake_stays_suspended_and_is_tried_again() -> None:
    rules = Rules(backoff=2, backoff_limit=5, retries=3)
    waking = replace(waiting("a"), status=Status.WAKING)
    once = failed(waking, NOW, rules)
    assert (once.status, once.retry_at, len(once.requests)) == (Status.SUSPENDED, NOW + 2, 1)
    found = decided(once, rules=rules)
    assert (found.actions, found.look_at) == ((), NOW + 2)
    assert shown(once, rules=rules, now=NOW + 2) == ["wake a"]
    delays = []
    for _ in range(3):
        once = failed(replace(once, status=Status.WAKING), NOW, rules)
        delays.append(once.retry_at - NOW)
    assert delays == [4, 5, 5]
    assert (once.status, once.requests) == (Status.FAILED, ())


def test_a_failed_seat_wakes_on_a_new_request() -> None:
    assert shown(waiting("a", status=Status.FAILED, failures=9, retry_at=NOW - 1)) == ["wake a"]


def test_a_failed_seat_does_not_block_others() -> None:
    broken = waiting("broken", 0, 1, ago=1000, priority=99, retry_at=NOW + 60, failures=3)
    assert shown(broken, waiting("a", 0), waiting("b", 1)) == ["wake a", "wake b"]


def test_a_seat_that_cannot_be_suspended_blocks_its_own_gpu_alone() -> None:
    stuck = active("stuck", 0, retry_at=NOW + 60, failures=4)
    seats = (waiting("wide", 0, 1, ago=1000), stuck, waiting("b", 1))
    assert shown(*seats) == ["wake b"]
    assert "suspend of stuck failed" in decided(*seats).turns["wide"].reason


def test_a_sick_gpu_blocks_only_its_seats() -> None:
    sick = (replace(gpus(1)[0], healthy=False), gpus(2)[1])
    found = decided(waiting("a", 0), waiting("b", 1), gpus=sick)
    assert [one.seat for one in found.actions] == ["b"]
    assert "not healthy" in found.turns["a"].reason


def test_a_seat_that_never_fits_waits_alone() -> None:
    found = decided(waiting("huge", need_bytes=90 * GIB, ago=9), waiting("b"))
    assert [one.seat for one in found.actions] == ["b"]
    assert "which has 80.0 GiB" in found.turns["huge"].reason


def test_both_sides_of_a_swap_overlap_where_they_can() -> None:
    out = active("out", busy=False, overlaps=True)
    assert shown(waiting("in", overlaps=True), out) == ["swap in out"]
    assert shown(waiting("in", overlaps=False), out) == ["suspend out"]
    assert shown(waiting("in", 0, 1, overlaps=True), out) == ["suspend out"]
    assert shown(waiting("in", overlaps=True, status=Status.PARKED), out) == ["suspend out"]


def test_a_standby_takes_the_place_of_a_lost_seat_at_once() -> None:
    standby = seat("standby", stands_by_for="main", since=1)
    main = active("main", since=1)
    other = waiting("other", priority=99, ago=1000)
    assert shown(standby, main) == []
    assert shown(standby, replace(main, lost=True), other) == ["suspend main"]
    assert shown(standby, seat("main", status=Status.FREE, lost=True), other) == ["wake standby"]


def test_a_request_ends_at_its_deadline() -> None:
    late = seat("a", requests=(Request(NOW - 9, deadline=NOW), Request(NOW - 5, deadline=NOW + 5)))
    found = decided(late, active("b", since=1))
    assert [type(one).__name__ for one in found.actions] == ["Refuse"]
    after = begun(state(late), found.actions[0], NOW)
    assert [one.deadline for one in after.seats["a"].requests] == [NOW + 5]


def test_what_is_back_in_time_uses_gpus_that_a_wide_seat_waits_for() -> None:
    seats = (waiting("wide", 0, 1, ago=9), active("a", 0, since=0), waiting("short", 1))
    assert shown(*seats, rules=Rules(slice=30)) == ["wake short"]
    assert shown(*seats, rules=Rules(slice=6)) == []


def test_what_was_let_past_a_waiting_seat_leaves_after_the_minimum_residency() -> None:
    passed = active("b", 1, since=6, asked_at=NOW - 7)
    assert shown(waiting("wide", 0, 1, ago=9), passed) == ["suspend b"]
    assert shown(waiting("wide", 0, 1, ago=9), replace(passed, asked_at=NOW - 10)) == []


def test_why_has_a_time_for_every_seat_in_the_queue() -> None:
    found = decided(active("a", since=10), waiting("b", ago=9), waiting("c", ago=8))
    assert found.turns["b"].at == NOW + 20
    assert NOW + 20 < found.turns["c"].at < NEVER
    assert found.turns["c"].reason == "b is before it"


def test_seats_that_are_found_active_together_are_separated() -> None:
    found = [active("a", since=5), active("b", since=9, busy=False), active("c", 1)]
    assert shown(*found) == ["suspend a"]
    assert shown(active("a", priority=3), active("b")) == ["suspend b"]
    shared = Rules(share_vram=True)
    assert shown(active("a", need_bytes=GIB), active("b", need_bytes=GIB), rules=shared) == []
