"""What holds of every decision, for any state and rules."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate.store.policy.decide import decide
from kybernate.store.policy.model import Copy, Delete, Key, Park, Rules, State
from kybernate.store.policy.outcome import after, arrived
from tests.unit.store.policy.states import any_rules, any_state

MOST_ROUNDS = 12
examples = settings(suppress_health_check=[HealthCheck.too_slow])


def safe(state: State) -> set[Key]:
    """Return the images that have a verified, undamaged copy in a tier that works."""
    return {
        image.key
        for image in state.images
        for tier, replica in image.replicas.items()
        if replica.verified and not replica.damaged and tier in state.tiers and state.tiers[tier].healthy
    }


@examples
@given(any_state(), any_rules, st.randoms(use_true_random=False))
def test_no_image_loses_its_last_good_copy_whatever_of_it_is_carried_out(
    state: State, rules: Rules, random: Random
) -> None:
    actions = [action for action in decide(state, rules) if not isinstance(action, Delete)]
    some = random.sample(actions, random.randint(0, len(actions)))
    had = safe(state)
    for number in range(len(some) + 1):
        then = after(state, [one for one in some[:number] if not isinstance(one, Copy)])
        assert had <= safe(then)


@examples
@given(any_state(), any_rules)
def test_decisions_lead_to_a_state_without_any(state: State, rules: Rules) -> None:
    state = arrived(state)
    for _ in range(MOST_ROUNDS):
        actions = decide(state, rules)
        if not actions:
            return
        state = after(state, actions)
    raise AssertionError(actions)


@examples
@given(any_state(), any_rules)
def test_copies_bring_no_tier_above_its_high_watermark(state: State, rules: Rules) -> None:
    then = after(state, decide(state, rules))
    for name, tier in then.tiers.items():
        high = rules.tier(name).high
        assert tier.above(high) <= max(0, state.tiers[name].above(high))


@examples
@given(any_state(), any_rules)
def test_each_action_is_possible_is_planned_once_and_spares_what_is_pinned_or_read(state: State, rules: Rules) -> None:
    images = {image.key: image for image in state.images}
    parkable = {one.container for one in state.suspended if one.parkable}
    actions = decide(state, rules)
    assert len({replace(action, reason="") for action in actions}) == len(actions)
    assert all(action.reason for action in actions)
    for action in actions:
        if isinstance(action, Park):
            assert action.container in parkable
            continue
        image = images[action.image]
        if isinstance(action, Copy):
            assert action.source in state.readable(image)
            assert state.healthy(action.target)
            assert action.target not in image.replicas
        else:
            assert not image.wanted_by
            assert not image.copying
            if isinstance(action, Delete):
                assert not image.pinned
            elif not image.replicas[action.tier].damaged:
                assert state.healthy(action.tier)
                assert not image.pinned
