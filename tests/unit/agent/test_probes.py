"""How long kubelet leaves a container frozen, by its pod's spec."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.verbs.probes import LIVENESS, STARTUP, ProbeLimit, freeze_allowed, limit_by_probes
from kybernate_shim.checkpoint.freeze_limit import ANNOTATION

HTTP: dict[str, Any] = {"httpGet": {"port": 80}}
NOW = 1_800_000_000.0


def spec(*probes: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    containers = [
        {"name": f"c{number}", **({"livenessProbe": probe} if probe else {})} for number, probe in enumerate(probes)
    ]
    return {"containers": containers, **more}


def allowed(spec: dict[str, Any], container: str = "") -> float | None:
    """Return the seconds that a pod of this spec allows, of whose state nothing is known."""
    limit = freeze_allowed({"spec": spec}, container, NOW)
    return None if limit is None else limit.seconds


def starting(startup: dict[str, Any], *, started: bool | None, seconds: float | None = None) -> dict[str, Any]:
    """Return a pod whose container began `seconds` ago, with a startup and a quick liveness probe."""
    liveness = {**HTTP, "periodSeconds": 1, "failureThreshold": 2}
    status: dict[str, Any] = {"name": "c"} if started is None else {"name": "c", "started": started}
    if seconds is not None:
        began = datetime.fromtimestamp(NOW - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status["state"] = {"running": {"startedAt": began}}
    return {
        "metadata": {},
        "spec": {"containers": [{"name": "c", "livenessProbe": liveness, "startupProbe": startup}]},
        "status": {"containerStatuses": [status]},
    }


def killed_after(period: int, timeout: int, failures: int, phase: float) -> float:
    """Return when kubelet's prober kills a container that answers nothing from 0 on: its loop, step by step.

    A ticker of `period`, of which the first tick comes at `phase`, holds one tick for a prober that is busy.
    """
    now, failed, tick = phase, 0, phase
    while True:
        now += timeout
        failed += 1
        if failed == failures:
            return now
        late = [tick + period * number for number in range(1, 1000)]
        waiting = [one for one in late if one <= now]
        tick = waiting[-1] if waiting else late[0]
        now = max(now, tick)


@pytest.mark.parametrize(
    ("probe", "seconds"),
    [
        ({**HTTP, "periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": 1}, 2),
        (HTTP, 21),  # the API's defaults: 10, 3 and 1
        ({**HTTP, "periodSeconds": 5, "failureThreshold": 1, "timeoutSeconds": 2}, 2),
        ({**HTTP, "periodSeconds": 1, "failureThreshold": 3, "timeoutSeconds": 4}, 12),
        ({"grpc": {"port": 1}, "periodSeconds": 2, "failureThreshold": 2}, 3),
        ({"exec": {"command": ["true"]}, "periodSeconds": 2, "failureThreshold": 2}, 3),
        ({"tcpSocket": {"port": 80}, "periodSeconds": 1, "failureThreshold": 1}, None),
        (None, None),
    ],
)
def test_the_last_failure_of_the_threshold_kills(probe: dict[str, Any] | None, seconds: float | None) -> None:
    assert allowed(spec(probe)) == seconds


@given(
    period=st.integers(1, 20), timeout=st.integers(1, 30), failures=st.integers(1, 6), phase=st.floats(0, 20, width=16)
)
def test_no_container_is_killed_before_that(period: int, timeout: int, failures: int, phase: float) -> None:
    probe = {**HTTP, "periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
    seconds = allowed(spec(probe))
    assert seconds is not None
    assert killed_after(period, timeout, failures, phase % period) >= seconds
    if timeout <= period:
        assert killed_after(period, timeout, failures, 0) == seconds


def test_probes_that_do_not_kill_do_not_count() -> None:
    container = {"name": "c", "readinessProbe": HTTP}
    assert allowed({"containers": [container], "initContainers": [{"name": "i", "livenessProbe": HTTP}]}) is None


SLOW = {**HTTP, "periodSeconds": 10, "failureThreshold": 6, "initialDelaySeconds": 5}


@pytest.mark.parametrize(
    ("pod", "limit"),
    [
        (starting(SLOW, started=True, seconds=50), ProbeLimit(2, LIVENESS)),  # it has no say any more
        (starting(SLOW, started=False), ProbeLimit(51, STARTUP)),  # the liveness probe has none yet
        (starting(SLOW, started=None), ProbeLimit(51, STARTUP)),  # kubelet has not looked yet
        (starting(SLOW, started=False, seconds=2), ProbeLimit(51, STARTUP)),
        (starting(SLOW, started=False, seconds=5), ProbeLimit(41, STARTUP)),
        (starting(SLOW, started=False, seconds=34), ProbeLimit(21, STARTUP)),
        (starting(SLOW, started=False, seconds=46), ProbeLimit(1, STARTUP)),
        (starting(SLOW, started=False, seconds=9999), ProbeLimit(1, STARTUP)),  # they began late, or succeed now
        (starting({"tcpSocket": {"port": 1}}, started=False), None),
    ],
)
def test_until_a_startup_probe_has_succeeded_it_is_the_one_that_kills(
    pod: dict[str, Any], limit: ProbeLimit | None
) -> None:
    assert freeze_allowed(pod, "c", NOW) == limit


def test_of_a_pod_without_a_state_both_probes_count() -> None:
    pod = starting(SLOW, started=False)
    assert freeze_allowed({**pod, "status": {}}, "c", NOW) == ProbeLimit(2, LIVENESS)
    pod["spec"]["containers"][0]["startupProbe"] = {**HTTP, "failureThreshold": 1}
    assert freeze_allowed({**pod, "status": {}}, "c", NOW) == ProbeLimit(1, STARTUP)


def test_shortest_of_all_containers_counts_or_that_of_one() -> None:
    slow, quick = {**HTTP, "periodSeconds": 9}, {**HTTP, "periodSeconds": 2}
    sidecar = {"name": "s", "restartPolicy": "Always", "livenessProbe": {**HTTP, "failureThreshold": 1}}
    both = spec(slow, quick, None, initContainers=[sidecar])
    assert allowed(both) == 1
    assert allowed(both, "c0") == 19
    assert allowed(both, "c1") == 5
    assert allowed(both, "s") == 1
    assert allowed(both, "c2") is None


def test_checkpoint_gets_less_than_kubelet_allows_for_it_has_to_answer_as_well() -> None:
    pod = {"metadata": {}, "spec": spec({**HTTP, "periodSeconds": 1, "failureThreshold": 2})}
    assert limit_by_probes(pod, "c0", NOW) == ProbeLimit(1.8, LIVENESS)
    assert limit_by_probes(pod, "other", NOW) == ProbeLimit()
    assert limit_by_probes(None, "c0", NOW) == ProbeLimit()


def test_annotation_of_the_pod_comes_before_its_probes() -> None:
    pod = {"metadata": {"annotations": {ANNOTATION: "none"}}, "spec": spec(HTTP)}
    assert limit_by_probes(pod, "c0", NOW) == ProbeLimit()
