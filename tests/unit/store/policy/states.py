"""States of the store for tests: a few words for one, and hypothesis strategies for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from kybernate.store.policy.model import (
    DISK,
    OBJECT,
    RAM,
    TIERS,
    Copying,
    ImageState,
    ReplicaState,
    Rules,
    State,
    SuspendedState,
    TierRules,
    TierState,
    WorkloadRules,
)

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC, a Friday
HOUR, DAY = 3600.0, 86400.0
SPEED = {RAM: 4 << 30, DISK: 1 << 30, OBJECT: 256 << 20}


def image(
    name: str,
    *tiers: str,
    size: int = 10,
    age: float = HOUR,
    workload: str = "w",
    uses: tuple[float, ...] = (),
    **more: object,
) -> ImageState:
    """Return an image with good replicas in `tiers`; `age` and `uses` in seconds ago."""
    made = ImageState(
        "ns",
        name,
        name,
        workload,
        NOW - age,
        size,
        {tier: ReplicaState(size, NOW - age) for tier in tiers},
        uses=tuple(NOW - ago for ago in uses),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def tiers(**capacities: int) -> dict[str, TierState]:
    """Return empty tiers of these capacities; 0 for no limit."""
    return {
        name: TierState(capacity, capacity, read_bytes_per_second=SPEED[name]) for name, capacity in capacities.items()
    }


def state(places: Mapping[str, TierState], *images: ImageState, **more: object) -> State:
    """Return a state whose tiers have these images in them."""
    found = dict(places)
    for one in images:
        for name, replica in one.replicas.items():
            if name in found:
                tier = found[name]
                found[name] = replace(
                    tier,
                    free_bytes=max(0, tier.free_bytes - replica.bytes),
                    used_bytes=tier.used_bytes + replica.bytes,
                )
    return State(NOW, found, images, **more)  # type: ignore[arg-type]


# ---- any state

sizes = st.integers(0, 60)
ages = st.one_of(st.floats(0, 2 * HOUR), st.floats(0, 60 * DAY), st.floats(-DAY, 0))
seconds = st.sampled_from((0.0, 60.0, HOUR, 30 * DAY))
daily = st.lists(st.integers(1, 20), max_size=12, unique=True).map(lambda days: tuple(NOW - day * DAY for day in days))
uses = st.one_of(daily, st.lists(ages, max_size=5).map(lambda found: tuple(NOW - age for age in found)))


@st.composite
def any_tier(draw: st.DrawFn) -> TierState:
    capacity = draw(st.sampled_from((0, 50, 100, 200)))
    foreign = draw(st.integers(0, capacity // 2)) if capacity else 0
    return TierState(
        capacity,
        capacity - foreign,
        draw(st.sampled_from((0, 0, 80))),
        healthy=draw(st.sampled_from((True, True, True, False))),
        read_bytes_per_second=draw(st.sampled_from((1, 1 << 30))),
        latency_seconds=draw(st.sampled_from((0.0, 1.0))),
    )


@st.composite
def any_image(draw: st.DrawFn, number: int) -> ImageState:
    size, created = draw(sizes), NOW - draw(ages)
    replicas = {
        tier: ReplicaState(
            draw(st.sampled_from((size, size // 2))),
            created,
            verified=draw(st.sampled_from((True, True, True, False))),
            damaged=draw(st.sampled_from((False, False, False, True))),
        )
        for tier in draw(st.sets(st.sampled_from((*TIERS, "peer:b"))))
    }
    targets = st.sampled_from(sorted(set(TIERS) - set(replicas)) or [RAM])
    copying = tuple(
        Copying(source, target)
        for source in (set(replicas) & set(TIERS))
        for target in draw(st.sets(targets, max_size=draw(st.sampled_from((0, 0, 0, 1)))))
        if target not in replicas
    )
    return ImageState(
        draw(st.sampled_from(("a", "b"))),
        f"image-{number}",
        f"name-{number}",
        draw(st.sampled_from(("", "v", "w"))),
        created,
        size,
        replicas,
        uses=draw(uses),
        pinned=draw(st.sampled_from((False, False, True))),
        wanted_by=draw(st.sampled_from(((), (), ("restore",)))),
        copying=copying[:1],
    )


@st.composite
def any_state(draw: st.DrawFn) -> State:
    places = {name: draw(any_tier()) for name in draw(st.sets(st.sampled_from(TIERS), min_size=1))}
    images = [draw(any_image(number)) for number in range(draw(st.integers(0, 8)))]
    suspended = tuple(
        SuspendedState("a", f"c{number}", "w", NOW - draw(ages), draw(sizes), parkable=draw(st.booleans()))
        for number in range(draw(st.integers(0, 3)))
    )
    arena = draw(st.sampled_from((None, TierState(100, 5), TierState(100, 80))))
    return state(
        places, *images, suspended=suspended, arena=arena, clock_trusted=draw(st.sampled_from((True, True, False)))
    )


any_workload_rules = st.builds(
    WorkloadRules,
    ttl=seconds,
    keep_last=st.integers(0, 2),
    minimum_copies=st.integers(0, 3),
    park_after=seconds,
    prefetch=st.booleans(),
    pinned=st.sampled_from((False, False, True)),
)
any_tier_rules = st.sampled_from((TierRules(), TierRules(0.5, 0.1), TierRules(1.0, 0.99)))
any_rules = st.builds(
    Rules,
    tiers=st.dictionaries(st.sampled_from(TIERS), any_tier_rules),
    default=any_workload_rules,
    workloads=st.lists(st.tuples(st.sampled_from(("a/*", "*/w")), any_workload_rules), max_size=2).map(tuple),
    persist_after=seconds,
    prefetch_hold=st.sampled_from((0.0, 1800.0)),
    park_high=st.sampled_from((1.0, 0.9)),
)
