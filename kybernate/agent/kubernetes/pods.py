"""The pods of this node, as the API server has them: listed once, then followed by a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kybernate.agent.kubernetes.api import GONE, Api, ApiRefused, ApiUnreachable, Object
from kybernate.agent.kubernetes.story import Subject
from kybernate.node.failure import Failure
from kybernate_shim.oci.annotations import PREFIX

if TYPE_CHECKING:
    from kybernate_shim.logs import Log

PODS: Final = "/api/v1/pods"
FIRST_PAUSE, LONGEST_PAUSE, REFUSED_PAUSE = 1.0, 60.0, 300.0  # the last one: the longest for want of a right
PROBED: Final = ("name", "livenessProbe", "readinessProbe", "startupProbe", "restartPolicy")
KINDS: Final = ("containers", "initContainers", "ephemeralContainers")


@dataclass(frozen=True)
class Pod:
    """What matters of a pod. `containers` are those of `spec.containers`; `fields` says where each one's entry is."""

    namespace: str
    name: str
    uid: str
    annotations: tuple[tuple[str, str], ...] = ()  # those that are ours, or look so
    containers: tuple[str, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    running: frozenset[str] = frozenset()  # containers
    ending: bool = False
    priority: int = 0  # of its class

    def subject(self, container: str = "") -> Subject:
        return Subject(self.namespace, self.name, self.uid, container)

    @property
    def names(self) -> tuple[str, ...]:
        """All containers, those that initialize and that debug included."""
        return tuple(name for name, _ in self.fields)


def probed(document: Object) -> Object:
    """Return of a pod's object what says how long its containers may be frozen: see verbs/probes.py."""
    metadata, spec, status = (_mapping(document.get(name)) for name in ("metadata", "spec", "status"))
    return {
        "metadata": {"annotations": _mapping(metadata.get("annotations"))},
        "spec": {kind: _only(PROBED, spec.get(kind)) for kind in ("containers", "initContainers")},
        "status": {
            kind: _only(("name", "started", "state"), status.get(kind))
            for kind in ("containerStatuses", "initContainerStatuses")
        },
    }


def _only(keys: tuple[str, ...], objects: Any) -> list[Object]:
    return [{key: one[key] for key in keys if key in one} for one in map(_mapping, objects or ())]


def pod_of(document: Object) -> Pod | None:
    """Return what matters of a pod's object; None where it is none."""
    metadata, spec, status = (_mapping(document.get(name)) for name in ("metadata", "spec", "status"))
    if not metadata.get("uid"):
        return None
    notes = _mapping(metadata.get("annotations"))
    listed = [(str(_mapping(one).get("name", "")), kind) for kind in KINDS for one in spec.get(kind) or ()]
    states = [_mapping(one) for kind in ("container", "initContainer", "ephemeralContainer")
              for one in status.get(f"{kind}Statuses") or ()]  # fmt: skip
    return Pod(
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        str(metadata["uid"]),
        tuple(sorted((key, str(value)) for key, value in notes.items() if PREFIX in key)),
        tuple(name for name, kind in listed if kind == "containers"),
        tuple((name, f"spec.{kind}{{{name}}}") for name, kind in listed),
        frozenset(str(one.get("name")) for one in states if _mapping(one.get("state")).get("running") is not None),
        bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
        spec["priority"] if isinstance(spec.get("priority"), int) else 0,
    )


@dataclass
class Pods:
    """Follows the pods of `node`. `changed` gets each one that is new or differs; `gone` is called when some are gone.

    Both are called on the event loop's thread, and must not block.
    """

    api: Api
    node: str
    log: Log
    changed: Callable[[Pod], object]
    gone: Callable[[], object]
    current: dict[tuple[str, str], Pod] = field(default_factory=dict)
    probes: dict[tuple[str, str], Object] = field(default_factory=dict)
    pauses: Callable[[float], Any] = asyncio.sleep
    _pause: float = 0.0
    _said: str = ""

    def get(self, namespace: str, name: str) -> Pod | None:
        """Return a pod as it is now, as far as known."""
        return self.current.get((namespace, name))

    def field_of(self, subject: Subject) -> str:
        """Return where a container's entry is in its pod's spec."""
        pod = self.get(subject.namespace, subject.pod)
        known = dict(pod.fields) if pod is not None else {}
        return known.get(subject.container, f"spec.containers{{{subject.container}}}")

    async def run(self) -> None:
        """Follow until cancelled. What fails is tried again, soon at first; the log says it once for each outage."""
        while True:
            try:
                await self._follow()
            except ApiRefused as error:
                if error.status != GONE:
                    await self._retry_later(error, refused=not error.temporary)
            except ApiUnreachable as error:
                await self._retry_later(error, refused=False)

    async def _retry_later(self, error: Failure, *, refused: bool) -> None:
        """Wait, the longer the more attempts have failed. A right may be missing only until the server has read it."""
        if refused and self._said != "refused":
            self.log.warning(
                "kubernetes.pods_refused", error=str(error), state="annotations of pods are not seen",
                advice="apply packaging/kubernetes/rbac.yaml",
            )  # fmt: skip
        elif not self._said:
            self.log.warning("kubernetes.pods_not_listed", error=str(error), state="annotations of pods wait")
        self._said = "refused" if refused else self._said or "unreachable"
        longest = REFUSED_PAUSE if refused else LONGEST_PAUSE
        self._pause = min(max(FIRST_PAUSE, self._pause * 2), longest)
        await self.pauses(self._pause)

    async def _follow(self) -> None:
        """List the pods, then take changes until the connection or the revision does not last. Raises as Api does."""
        selector = f"spec.nodeName={self.node}"
        objects, revision = await self.api.list(PODS, selector)
        listed = [(pod, document) for document in objects if (pod := pod_of(document)) is not None]
        found = {(pod.namespace, pod.name): pod for pod, _ in listed}
        self.probes = {(pod.namespace, pod.name): probed(document) for pod, document in listed}
        before, self.current = self.current, found
        for key, pod in found.items():
            if before.get(key) != pod:
                self.changed(pod)
        self.gone()
        while True:
            async with aclosing(self.api.watch(PODS, selector, revision)) as changes:
                async for kind, document in changes:
                    self._pause, self._said = 0.0, ""  # not after the list alone: the watch may be what is refused
                    revision = str(_mapping(document.get("metadata")).get("resourceVersion") or revision)
                    if kind != "BOOKMARK":
                        self._take(kind, document)
            self._pause, self._said = 0.0, ""

    def _take(self, kind: str, document: Object) -> None:
        pod = pod_of(document)
        if pod is None:
            return
        key = pod.namespace, pod.name
        if kind == "DELETED":
            self.probes.pop(key, None)
            if self.current.pop(key, pod).annotations:
                self.gone()
            return
        self.probes[key] = probed(document)
        if self.current.get(key) != pod:
            self.current[key] = pod
            self.changed(pod)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
