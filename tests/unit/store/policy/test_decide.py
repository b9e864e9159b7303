"""What is decided in particular cases: watermarks, copies, retention, parking, forecasts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kybernate.store.policy.decide import decide
from kybernate.store.policy.model import (
    DISK,
    OBJECT,
    RAM,
    Action,
    Copy,
    Copying,
    Delete,
    Evict,
    ImageState,
    Key,
    Park,
    Priority,
    ReplicaState,
    Rules,
    State,
    SuspendedState,
    TierState,
    WorkloadRules,
)
from kybernate.store.policy.outcome import after
from tests.unit.store.policy.states import DAY, HOUR, NOW, image, state, tiers

ALL = tiers(ram=100, disk=1000, object=0)
NO_COPIES = Rules(default=WorkloadRules(minimum_copies=0))


def shown(actions: Iterable[Action]) -> list[str]:
    """Return actions in few words."""
    found = []
    for action in actions:
        match action:
            case Copy(key, source, target):
                found.append(f"copy {key.id} {source} {target}")
            case Evict(key, tier):
                found.append(f"evict {key.id} {tier}")
            case Delete(key):
                found.append(f"delete {key.id}")
            case Park(_, container):
                found.append(f"park {container}")
    return found


def decided(found: State, rules: Rules = Rules()) -> list[str]:  # noqa: B008  (frozen)
    return shown(decide(found, rules))


# ---- copies


def test_image_in_memory_is_copied_to_disk_once_it_has_settled() -> None:
    assert decided(state(ALL, image("a", RAM, age=30))) == []
    assert decided(state(ALL, image("a", RAM, age=90))) == ["copy a ram disk"]


def test_copy_that_is_being_made_is_not_planned_again() -> None:
    assert decided(state(ALL, image("a", RAM, copying=(Copying(RAM, DISK),)))) == []


def test_as_many_copies_are_made_as_the_rules_want_and_there_are_tiers() -> None:
    rules = Rules(default=WorkloadRules(minimum_copies=2))
    assert decided(state(ALL, image("a", RAM)), rules) == ["copy a ram disk", "copy a ram object"]
    assert decided(state(tiers(ram=100, disk=100), image("a", DISK)), rules) == []
    assert decided(state(ALL, image("a", RAM)), NO_COPIES) == []


def test_image_in_memory_is_copied_elsewhere_when_the_disk_breaks() -> None:
    broken = {**ALL, DISK: replace(ALL[DISK], healthy=False)}
    assert decided(state(broken, image("a", RAM, DISK))) == ["copy a ram object"]


def test_full_disk_is_passed_over() -> None:
    full = {**ALL, DISK: TierState(100, 11)}
    assert decided(state(full, image("a", RAM))) == ["copy a ram object"]


def test_damaged_copy_is_removed_and_then_made_again_from_a_good_one() -> None:
    damaged = ReplicaState(10, NOW - DAY, damaged=True)
    found = state(ALL, image("a", RAM, replicas={RAM: ReplicaState(10, NOW - DAY), DISK: damaged}))
    rules = Rules(default=WorkloadRules(minimum_copies=2))
    assert decided(found, rules) == ["evict a disk", "copy a ram object"]
    assert decided(after(found, decide(found, rules)), rules) == ["copy a ram disk"]


def test_damaged_copy_without_a_good_one_stays() -> None:
    assert decided(state(ALL, image("a", replicas={DISK: ReplicaState(10, NOW, damaged=True)}))) == []


# ---- watermarks


def crowd(*more: ImageState) -> State:
    """Return a state whose memory is above its high watermark: nine images that are on disk, too, and `more`."""
    return state(ALL, *(image(f"i{number}", RAM, DISK, age=HOUR * (number + 1)) for number in range(9)), *more)


def test_memory_above_its_high_watermark_is_relieved_down_to_the_low_one() -> None:
    assert decided(crowd(image("x", RAM, DISK))) == ["evict i8 ram", "evict i7 ram"]


def test_at_the_high_watermark_nothing_leaves() -> None:
    assert decided(crowd()) == []


def test_quota_counts_as_the_capacity_does() -> None:
    small = {**ALL, RAM: replace(ALL[RAM], capacity_bytes=0, quota_bytes=50)}
    assert len(decided(state(small, *(image(f"i{number}", RAM, DISK) for number in range(5))))) == 1


def test_what_is_used_often_stays() -> None:
    found = crowd(image("x", RAM, DISK))
    often = tuple(
        replace(one, uses=(NOW - 60, NOW - 600, NOW - 1200)) if one.id == "i8" else one for one in found.images
    )
    assert decided(replace(found, images=often)) == ["evict i7 ram", "evict i6 ram"]


def test_what_is_in_memory_alone_is_copied_first_and_evicted_then() -> None:
    found = crowd(image("x", RAM, age=30 * DAY))
    assert decided(found, NO_COPIES) == ["copy x ram disk", "evict i8 ram"]
    then = after(found, decide(found, NO_COPIES))
    assert decided(then, NO_COPIES) == []  # the one that has left was enough to be below the high watermark


def test_what_is_being_demoted_counts_as_leaving() -> None:
    found = crowd(image("x", RAM, age=30 * DAY, copying=(Copying(RAM, DISK),)))
    assert decided(found, NO_COPIES) == ["evict i8 ram"]


@pytest.mark.parametrize(
    "spared", [{"pinned": True}, {"wanted_by": ("restore",)}, {"copying": (Copying(RAM, OBJECT),)}]
)
def test_pinned_restored_and_copied_images_stay(spared: dict[str, object]) -> None:
    found = crowd(image("x", RAM, DISK, age=30 * DAY, **spared))
    assert "evict x ram" not in decided(found)


def test_copy_whose_source_is_not_known_counts_as_leaving_too() -> None:
    found = crowd(image("x", RAM, age=30 * DAY, copying=(Copying("", DISK),)))
    assert decided(found, NO_COPIES) == ["evict i8 ram"]


def test_newest_image_of_a_workload_is_as_warm_as_the_workload() -> None:
    new = image("new", RAM, DISK, age=12 * HOUR, workload="v")
    found = crowd(new, image("old", RAM, DISK, age=13 * HOUR, workload="v"))
    assert decided(found) == ["evict old ram", "evict new ram"]
    busy = replace(found, uses={"ns/v": tuple(NOW - minutes * 60 for minutes in range(1, 20))})
    assert decided(busy) == ["evict old ram", "evict i8 ram"]


def test_copy_that_was_never_verified_or_is_out_of_reach_is_not_relied_on() -> None:
    for disk in (ReplicaState(10, NOW, verified=False), ReplicaState(10, NOW, damaged=True)):
        replicas = {RAM: ReplicaState(10, NOW), DISK: disk}
        only_disk = {**tiers(ram=100, disk=1000), RAM: TierState(100, 5)}
        assert "evict x ram" not in decided(state(only_disk, image("x", replicas=replicas, age=30 * DAY)))
    broken = {**tiers(ram=100, disk=1000), RAM: TierState(100, 5)}
    broken[DISK] = replace(broken[DISK], healthy=False)
    assert decided(state(broken, image("x", RAM, DISK, age=30 * DAY))) == []


def test_full_disk_is_relieved_into_the_object_store_and_stays_full_without_one() -> None:
    images = [image(f"i{number}", DISK, size=100, age=HOUR * (number + 1)) for number in range(10)]
    assert decided(state(ALL, *images)) == ["copy i9 disk object", "copy i8 disk object"]
    assert decided(state(tiers(ram=100, disk=1000), *images)) == []


def test_minimum_copies_keep_a_full_disk_full() -> None:
    images = [image(f"i{number}", DISK, OBJECT, size=100) for number in range(10)]
    assert decided(state(ALL, *images), Rules(default=WorkloadRules(minimum_copies=2))) == []
    assert len(decided(state(ALL, *images))) == 2


# ---- retention


def test_image_that_was_not_used_for_its_ttl_is_deleted() -> None:
    rules = Rules(default=WorkloadRules(ttl=DAY))
    old, used = image("old", DISK, age=2 * DAY), image("used", RAM, DISK, age=2 * DAY, last_used=NOW - HOUR)
    assert decided(state(ALL, old, used), rules) == ["delete old"]
    assert decided(state(ALL, old, clock_trusted=False), rules) == []


def test_newest_images_of_a_workload_are_kept() -> None:
    rules = Rules(workloads=(("ns/w", WorkloadRules(keep_last=2)),))
    images = [image(f"i{number}", DISK, age=HOUR * (number + 1)) for number in range(4)]
    other = [
        image(f"o{number}", DISK, workload=workload) for number, workload in enumerate(("v", "v", "v", "", "", ""))
    ]
    assert decided(state(ALL, *images, *other), rules) == ["delete i2", "delete i3"]


def test_damaged_image_does_not_replace_a_good_one() -> None:
    rules = Rules(default=WorkloadRules(keep_last=1))
    damaged = image("new", replicas={DISK: ReplicaState(10, NOW, damaged=True)}, age=60)
    assert decided(state(ALL, damaged, image("good", DISK), image("old", DISK, age=DAY)), rules) == ["delete old"]


@pytest.mark.parametrize("spared", [{"pinned": True}, {"wanted_by": ("restore",)}])
def test_pinned_and_restored_images_are_never_deleted(spared: dict[str, object]) -> None:
    rules = Rules(default=WorkloadRules(ttl=1, keep_last=1))
    assert decided(state(ALL, image("a", DISK, age=DAY, **spared), image("b", DISK, age=0)), rules) == []


def test_rule_that_pins_is_as_good_as_a_pin() -> None:
    rules = Rules(default=WorkloadRules(ttl=1), workloads=(("ns/*", WorkloadRules(ttl=1, pinned=True)),))
    assert decided(state(ALL, image("a", DISK, age=DAY)), rules) == []


def test_nothing_is_deleted_while_a_tier_with_a_copy_is_away() -> None:
    rules = Rules(default=WorkloadRules(ttl=DAY))
    away = {**ALL, OBJECT: replace(ALL[OBJECT], healthy=False)}
    assert decided(state(away, image("a", DISK, OBJECT, age=2 * DAY)), rules) == []


# ---- suspended containers


def suspended(name: str, idle: float, **more: object) -> SuspendedState:
    return replace(SuspendedState("ns", name, "w", NOW - idle, 100), **more)  # type: ignore[arg-type]


def test_container_that_is_suspended_too_long_is_parked() -> None:
    rules = Rules(default=WorkloadRules(park_after=HOUR))
    there = (suspended("long", 2 * HOUR), suspended("short", 60), suspended("not", DAY, parkable=False))
    active = suspended("active", DAY, last_active=NOW - 60)
    assert decided(state(ALL, suspended=(*there, active)), rules) == ["park long"]
    assert decided(state(ALL, suspended=there)) == []
    assert decided(state(ALL, suspended=there, clock_trusted=False), rules) == []


def test_parked_container_needs_room_on_disk() -> None:
    rules = Rules(default=WorkloadRules(park_after=HOUR))
    there = tuple(suspended(f"c{number}", DAY + number) for number in range(12))
    assert decided(state(ALL, suspended=there), rules) == [f"park c{number}" for number in range(11, 2, -1)]


def test_full_arena_parks_the_longest_idle() -> None:
    rules = Rules(park_high=0.9)
    there = tuple(suspended(f"c{number}", HOUR * (number + 1)) for number in range(4))
    found = state(ALL, suspended=there, arena=TierState(1000, 50))
    assert decided(found, rules) == ["park c3", "park c2"]
    assert decided(found) == []


# ---- what comes into memory

MORNINGS = tuple(NOW + HOUR - day * DAY for day in (1, 2, 3, 4, 7, 8, 9, 10))  # 09:00 on weekdays, today is a Friday
MINUTES = 60.0


def at(found: State, minutes: float) -> State:
    """Return a state `minutes` after 8:00."""
    return replace(found, now=NOW + minutes * MINUTES)


def test_image_is_copied_into_memory_shortly_before_its_usual_use() -> None:
    found = state(ALL, image("a", DISK, age=DAY), uses={"ns/w": MORNINGS})
    assert decided(at(found, 58)) == []
    assert decided(at(found, 58.5)) == ["copy a disk ram"]
    (copy,) = decide(at(found, 58.5), Rules())
    assert isinstance(copy, Copy)
    assert copy.priority == Priority.PREFETCH
    assert copy.reason == "its workload is used every weekday at 09:00 (5 of the last 5)"
    assert decided(at(found, 24 * 60 + 58.5)) == []  # Saturday
    assert decided(at(found, 58.5), Rules(default=WorkloadRules(prefetch=False))) == []


def test_prefetched_image_stays_until_it_was_used_or_its_time_is_over() -> None:
    first = state(ALL, image("a", DISK, age=DAY), uses={"ns/w": MORNINGS})
    now = after(at(first, 58.5), decide(at(first, 58.5), Rules()))
    assert decided(at(now, 70)) == []
    used = replace(now, images=tuple(replace(one, last_used=NOW + HOUR) for one in now.images))
    assert decided(at(used, 70)) == []
    gone = after(used, [Evict(Key("ns", "a"), RAM, "")])
    (again,) = decide(at(gone, 70), Rules())
    assert isinstance(again, Copy)
    assert again.priority == Priority.PROMOTION  # it is not expected any more; it is in use


def test_colder_images_leave_for_one_that_is_expected() -> None:
    cold = [image(f"i{number}", RAM, DISK, workload="v", age=10 * DAY) for number in range(8)]
    expected = image("a", DISK, age=DAY, size=20)
    found = at(state(ALL, *cold, expected, uses={"ns/w": MORNINGS}), 59)
    assert decided(found) == ["evict i0 ram"]
    assert decided(replace(after(found, decide(found, Rules())))) == ["copy a disk ram"]


def test_image_that_is_used_again_and_again_comes_into_memory_as_far_as_there_is_room() -> None:
    uses = (60.0, 600.0, 1800.0)
    assert decided(state(ALL, image("a", DISK, uses=uses))) == ["copy a disk ram"]
    assert decided(state(ALL, image("a", DISK, uses=uses, size=90))) == []
    cold = [image(f"i{number}", RAM, DISK, age=10 * DAY) for number in range(8)]
    assert decided(state(ALL, *cold, image("a", DISK, uses=uses))) == ["evict i0 ram"]


def test_workload_has_the_rules_of_the_first_pattern_that_matches() -> None:
    first, second = WorkloadRules(keep_last=1), WorkloadRules(keep_last=2)
    rules = Rules(workloads=(("a/*", first), ("*", second)))
    assert rules.of("a/w") is first
    assert rules.of("b/w") is second
    assert Rules().of("b/w") == WorkloadRules()
