"""How long kubelet leaves a container of a pod frozen before it kills it: by the probes in the pod's spec.

A probe that began just before the freeze fails when its timeout is over, and the next ones begin each period, or when
the one before has ended if that is later. With the last of `failureThreshold` failures in a row, kubelet kills. A
readiness probe only takes the pod out of its Services for as long. Until a startup probe has succeeded, kubelet runs no
other probe of that container and kills by this one: all that it has run since the start have failed, and count. A
tcpSocket probe does not fail: the kernel accepts connections for a process that is frozen.
Sources: kubelet's pkg/kubelet/prober, worker.go and prober.go; core/v1 Probe, with its defaults; core/v1
ContainerStatus, whose `started` is true from the success of the startup probe on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from kybernate_shim.checkpoint.freeze_limit import ANNOTATION

ANSWERED: Final = ("httpGet", "grpc", "exec")  # kinds of probes that a process of the container has to answer
PERIOD, TIMEOUT, THRESHOLD = 10, 1, 3  # the API's defaults
USED: Final = 0.9  # the part of what is allowed that a checkpoint gets: its undo, and the answer, take time as well
LIVENESS, STARTUP = "the liveness probe", "the startup probe"


@dataclass(frozen=True)
class ProbeLimit:
    """Seconds for which a checkpoint may freeze a container, and what says so; 0 where nothing does."""

    seconds: float = 0
    source: str = ""


def freeze_allowed(pod: Mapping[str, Any], container: str, now: float) -> ProbeLimit | None:
    """Return after how many seconds of a freeze kubelet kills the first of the containers, and why; None: never.

    `pod` is the API's object, `now` the UNIX time. `container` is the name of the only one that is frozen, "" for all.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    states = {
        one.get("name"): one
        for kind in ("containerStatuses", "initContainerStatuses")
        for one in status.get(kind) or ()
    }
    found = [
        limit
        for one in _in_parallel(spec)
        if container in ("", one.get("name"))
        for limit in _limits(one, states.get(one.get("name")), now)
    ]
    return min(found, key=lambda limit: limit.seconds, default=None)


def limit_by_probes(pod: Mapping[str, Any] | None, container: str, now: float) -> ProbeLimit:
    """Return the limit for a checkpoint of a pod's container; none for a pod whose annotation has one itself.

    `pod` is the API's object, None where it is not known.
    """
    metadata = (pod or {}).get("metadata") or {}
    if pod is None or ANNOTATION in (metadata.get("annotations") or {}):
        return ProbeLimit()
    allowed = freeze_allowed(pod, container, now)
    if allowed is None:
        return ProbeLimit()
    return ProbeLimit(math.floor(allowed.seconds * USED * 1000) / 1000, allowed.source)


def _in_parallel(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the containers that run in parallel, sidecars among them: no others have such probes."""
    yield from spec.get("containers") or ()
    yield from (one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always")


def _limits(container: Mapping[str, Any], state: Mapping[str, Any] | None, now: float) -> Iterator[ProbeLimit]:
    """Yield what limits the freeze of one container: of two probes both, where nothing says which of them runs."""
    liveness, startup = container.get("livenessProbe"), container.get("startupProbe")
    started = True if not startup else state.get("started") is True if state is not None else None
    if liveness and started is not False and (allowed := _until_the_kill(liveness)) is not None:
        yield ProbeLimit(allowed, LIVENESS)
    if startup and started is not True:
        running = ((state or {}).get("state") or {}).get("running") or {}
        failed = _failures(startup, str(running.get("startedAt") or ""), now)
        if (allowed := _until_the_kill(startup, failed)) is not None:
            yield ProbeLimit(allowed, STARTUP)


def _failures(probe: Mapping[str, Any], started: str, now: float) -> int:
    """Return how often a probe can have failed since the start of its container; 0 for a start that is not known."""
    try:
        since = now - datetime.fromisoformat(started).timestamp() - (probe.get("initialDelaySeconds") or 0)
    except ValueError:
        return 0
    return max(0, math.floor(since / (probe.get("periodSeconds") or PERIOD)) + 1)


def _until_the_kill(probe: Mapping[str, Any], failed: int = 0) -> float | None:
    """Return how long a frozen container lives at least, of which a probe has `failed` by now; None: no limit."""
    if not any(kind in probe for kind in ANSWERED):
        return None
    period = probe.get("periodSeconds") or PERIOD
    timeout = probe.get("timeoutSeconds") or TIMEOUT
    left = max(1, (probe.get("failureThreshold") or THRESHOLD) - failed)
    return float((left - 1) * max(period, timeout) + timeout)
