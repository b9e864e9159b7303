"""Which workload a container belongs to, by labels and annotations. Pure.

A label or annotation of the user's comes first. Of Kubernetes' own labels, those that a controller adds to its pods say
which part of the pod's name is the controller's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

WORKLOAD = "kybernate.io/workload"
JOBS = ("batch.kubernetes.io/job-name", "job-name")
REPLICA_SET = "pod-template-hash"
STATEFUL_SET = "statefulset.kubernetes.io/pod-name"
REVISION = "controller-revision-hash"
OF_PODS = (WORKLOAD, *JOBS, REPLICA_SET, STATEFUL_SET, REVISION)  # labels of a pod that matter here


def workload_of(sources: Iterable[Mapping[str, str]], pod: str, pod_labels: Mapping[str, str]) -> str:
    """Return the workload's name, "" where none is known.

    `sources` are labels and annotations that may name it, in order of precedence; `pod_labels` are those of the pod.
    """
    named = next((source[WORKLOAD] for source in sources if source.get(WORKLOAD)), "")
    return named or _owner(pod, pod_labels)


def _owner(pod: str, labels: Mapping[str, str]) -> str:
    for job in JOBS:
        if labels.get(job):
            return labels[job]
    if hash := labels.get(REPLICA_SET):
        return pod.rpartition(f"-{hash}-")[0]
    if labels.get(STATEFUL_SET) == pod:
        return re.sub(r"-\d+$", "", pod)
    if labels.get(REVISION):
        return re.sub(r"-[a-z0-9]{5}$", "", pod)  # a daemon set's
    return ""
