"""What a state becomes when actions are carried out, all of them, without time passing: for tests and previews."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kybernate.store.policy.model import (
    DISK,
    Action,
    Copy,
    Delete,
    Evict,
    ImageState,
    Key,
    Park,
    ReplicaState,
    State,
    TierState,
)
from kybernate.store.policy.plan import without


def after(state: State, actions: Iterable[Action]) -> State:
    """Return the state with all actions done. A parked container is an image on disk, made now."""
    for action in actions:
        match action:
            case Copy():
                state = _copied(state, action)
            case Evict():
                state = _evicted(state, action.image, (action.tier,))
            case Delete():
                state = _evicted(state, action.image, state_of(state, action.image).replicas)
                state = replace(state, images=tuple(one for one in state.images if one.key != action.image))
            case Park():
                state = _parked(state, action)
    return state


def state_of(state: State, key: Key) -> ImageState:
    """Return an image. Raises StopIteration."""
    return next(one for one in state.images if one.key == key)


def arrived(state: State) -> State:
    """Return the state with all copies done that are being made."""
    for image in state.images:
        for copying in image.copying:
            state = _with_replica(state, image.key, copying.target)
    return state


def _copied(state: State, action: Copy) -> State:
    return _with_replica(state, action.image, action.target)


def _with_replica(state: State, key: Key, tier: str) -> State:
    image = state_of(state, key)
    replicas = {**image.replicas, tier: ReplicaState(image.size_bytes, state.now)}
    left = tuple(one for one in image.copying if one.target != tier)
    state = _with_image(state, replace(image, replicas=replicas, copying=left))
    return replace(state, tiers=_with_bytes(state.tiers, tier, image.size_bytes))


def _evicted(state: State, key: Key, tiers: Iterable[str]) -> State:
    image = state_of(state, key)
    for tier in tuple(tiers):
        state = replace(state, tiers=_with_bytes(state.tiers, tier, -image.replicas[tier].bytes))
    left = {name: replica for name, replica in image.replicas.items() if name not in tiers}
    return _with_image(state, replace(image, replicas=left))


def _parked(state: State, action: Park) -> State:
    one = next(one for one in state.suspended if (one.namespace, one.container) == (action.namespace, action.container))
    name = f"parked-{one.container}"
    image = ImageState(
        one.namespace, name, name, one.workload, state.now, one.bytes, {DISK: ReplicaState(one.bytes, state.now)}
    )
    return replace(
        state,
        images=(*state.images, image),
        suspended=tuple(other for other in state.suspended if other is not one),
        arena=None if state.arena is None else without(state.arena, one.bytes),
        tiers=_with_bytes(state.tiers, DISK, one.bytes),
    )


def _with_image(state: State, image: ImageState) -> State:
    return replace(state, images=tuple(image if one.key == image.key else one for one in state.images))


def _with_bytes(tiers: Mapping[str, TierState], name: str, size: int) -> Mapping[str, TierState]:
    return {**tiers, name: without(tiers[name], -size)} if name in tiers else tiers
