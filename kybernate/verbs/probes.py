"""How long kubelet leaves a container of a pod frozen before it kills it: by the liveness probe in the pod's spec.

A probe that began just before the freeze fails when its timeout is over, and the next ones begin each period, or when
the one before has ended if that is later. With the last of `failureThreshold` failures in a row, kubelet kills. A
readiness probe only takes the pod out of its Services for as long; a startup probe has no say once it has succeeded.
A tcpSocket probe does not fail: the kernel accepts connections for a process that is frozen.
Sources: kubelet's pkg/kubelet/prober, worker.go and prober.go; core/v1 Probe, with its defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kybernate_shim.checkpoint.freeze_limit import ANNOTATION

ANSWERED: Final = ("httpGet", "grpc", "exec")  # kinds of probes that a process of the container has to answer
PERIOD, TIMEOUT, THRESHOLD = 10, 1, 3  # the API's defaults
USED: Final = 0.9  # the part of what is allowed that a checkpoint gets: its undo, and the answer, take time as well
SOURCE: Final = "the liveness probe"


@dataclass(frozen=True)
class ProbeLimit:
    """Seconds for which a checkpoint may freeze a container, and what says so; 0 where nothing does."""

    seconds: float = 0
    source: str = ""


def freeze_allowed(pod_spec: Mapping[str, Any], container: str = "") -> float | None:
    """Return after how many seconds of a freeze kubelet kills the first of the containers; None: never.

    `pod_spec` is the `spec` of a pod. `container` is the name of the only one that is frozen, "" for all.
    """
    found = [seconds for probe in _probes(pod_spec, container) if (seconds := _until_the_kill(probe)) is not None]
    return min(found, default=None)


def limit_by_probes(pod: Mapping[str, Any] | None, container: str) -> ProbeLimit:
    """Return the limit for a checkpoint of a pod's container; none for a pod whose annotation has one itself.

    `pod` is the API's object, None where it is not known.
    """
    metadata = (pod or {}).get("metadata") or {}
    if pod is None or ANNOTATION in (metadata.get("annotations") or {}):
        return ProbeLimit()
    allowed = freeze_allowed(pod.get("spec") or {}, container)
    return ProbeLimit() if allowed is None else ProbeLimit(math.floor(allowed * USED * 1000) / 1000, SOURCE)


def _probes(pod_spec: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the liveness probes of the containers that run in parallel, sidecars among them."""
    sidecars = [one for one in pod_spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    for container in (*(pod_spec.get("containers") or ()), *sidecars):
        probe = container.get("livenessProbe")
        if probe and name in ("", container.get("name")):
            yield probe


def _until_the_kill(probe: Mapping[str, Any]) -> float | None:
    if not any(kind in probe for kind in ANSWERED):
        return None
    period = probe.get("periodSeconds") or PERIOD
    timeout = probe.get("timeoutSeconds") or TIMEOUT
    failures = probe.get("failureThreshold") or THRESHOLD
    return float((failures - 1) * max(period, timeout) + timeout)
