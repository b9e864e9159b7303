"""Images that end by the user's rules, `ttl` and `keep_last`: no other decision may remove an image's last copy."""

from __future__ import annotations

from collections import defaultdict

from kybernate.store.policy.model import TIERS, ImageState
from kybernate.store.policy.plan import Plan
from kybernate.store.policy.wording import duration


def plan_deletions(plan: Plan) -> None:
    """Delete what is too old, or what enough newer images of the workload have replaced.

    Nothing that is pinned, being restored or being copied is deleted, and nothing while a tier that has a replica is
    not healthy: the replica would stay, and come back as an image. Nothing is too old while the clock is not trusted.
    """
    for image in [image for image in plan.images.values() if _may_end(plan, image)]:
        ttl = plan.rules_of(image).ttl
        age = plan.now - image.touched
        if ttl and age > ttl and plan.state.clock_trusted:
            plan.delete(image, f"it was not used for {duration(age)}; its workload's ttl is {duration(ttl)}")
    for image, keep in _replaced(plan):
        if _may_end(plan, image):
            plan.delete(image, f"its workload {image.owner} has {keep} newer images; keep_last is {keep}")


def _may_end(plan: Plan, image: ImageState) -> bool:
    return plan.is_free(image) and all(plan.state.healthy(tier) for tier in image.replicas if tier in TIERS)


def _replaced(plan: Plan) -> list[tuple[ImageState, int]]:
    """Return images with `keep_last` newer ones that are good. Those without a known workload replace nothing."""
    by_owner: dict[str, list[ImageState]] = defaultdict(list)
    for image in plan.images.values():
        if image.workload and plan.rules_of(image).keep_last:
            by_owner[image.owner].append(image)
    return [found for images in by_owner.values() for found in _beyond(plan, images)]


def _beyond(plan: Plan, images: list[ImageState]) -> list[tuple[ImageState, int]]:
    keep = plan.rules_of(images[0]).keep_last
    found, good = [], 0
    for image in sorted(images, key=lambda one: (one.created, one.id), reverse=True):
        if good >= keep:
            found.append((image, keep))
        good += bool(plan.good(image))
    return found
