"""The events of a pod, as a test reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.system.ctr import eventually


@dataclass(frozen=True)
class PodEvent:
    reason: str
    message: str
    type: str
    source: str
    field: str
    count: int


def events_of(kubectl: Kubectl, pod: str, source: str = "kybernate") -> list[PodEvent]:
    """Return a pod's events of one source, the oldest first."""
    found = kubectl.items("events", "--field-selector", f"involvedObject.name={pod}")
    found.sort(key=lambda one: (one.get("firstTimestamp") or "", one["metadata"]["creationTimestamp"],
                                int(one["metadata"]["resourceVersion"])))  # fmt: skip
    return [_event(one) for one in found if one["source"].get("component") == source]


def wait_for(kubectl: Kubectl, pod: str, reason: str, *, seconds: float = 60) -> PodEvent:
    """Return the first event of that reason, once there is one."""
    found: list[PodEvent] = []

    def there() -> bool:
        found[:] = [one for one in events_of(kubectl, pod) if one.reason == reason]
        return bool(found)

    assert eventually(there, seconds=seconds), f"no event {reason}: {events_of(kubectl, pod)}"
    return found[0]


def _event(one: dict[str, Any]) -> PodEvent:
    return PodEvent(
        one["reason"], one["message"], one["type"], one["source"].get("component", ""),
        one["involvedObject"].get("fieldPath", ""), int(one.get("count") or 1),
    )  # fmt: skip
