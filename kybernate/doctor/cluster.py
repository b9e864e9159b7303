"""Kubernetes on this node: whether a kubelet runs, and whether the cluster has a RuntimeClass for the handler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil

from kybernate.agent.kubernetes.access import Access, access_of, of_kubeconfig
from kybernate.agent.settings import Kubernetes
from kybernate.node.failure import Failure, Invalid
from kybernate.node.finding import HealthFinding
from kybernate_shim.linux.process import is_nodes_own

CLASSES: Final = "/apis/node.k8s.io/v1/runtimeclasses"
ANSWER_SECONDS: Final = 10.0
HANDLER: Final = "kybernate"


@dataclass(frozen=True)
class ClusterFacts:
    """What was found. `kubelet` is its process, 0 on a node of no cluster; `classes` are handlers by RuntimeClass.

    `asked` is None where the API server was not asked, because no identity is configured that may.
    """

    kubelet: int = 0
    asked: str | None = None
    classes: tuple[tuple[str, str], ...] = ()
    problem: str = ""


def findings(facts: ClusterFacts) -> Iterator[HealthFinding]:
    """Yield what is found of Kubernetes; nothing on a node of no cluster."""
    if not facts.kubelet and facts.asked is None:
        return
    if facts.kubelet:
        yield HealthFinding("kubelet", "ok", f"process {facts.kubelet}")
    else:
        yield HealthFinding("kubelet", "note", "does not run on this node", "`systemctl start kubelet`")
    subject = "RuntimeClass"
    if facts.problem:
        yield HealthFinding(subject, "note", facts.problem, "`kubectl get runtimeclasses` shows them elsewhere")
    elif facts.asked is None:
        advice = "`kubectl get runtimeclasses`; `kubernetes.kubeconfig` in agent.toml lets this command look"
        yield HealthFinding(subject, "note", "the API server was not asked", advice)
    elif named := [name for name, handler in facts.classes if handler == HANDLER]:
        yield HealthFinding(subject, "ok", f"{', '.join(named)}, with the handler {HANDLER}")
    else:
        advice = "`kubectl apply -f runtimeclass/runtimeclass.yaml`"
        yield HealthFinding(subject, "bad", f"none of {facts.asked} has the handler {HANDLER}", advice)


def gather(settings: Kubernetes) -> ClusterFacts:
    """Look for the kubelet, and ask the API server as the agent does, or as the kubelet."""
    kubelet, argv = _kubelet()
    try:
        access = access_of(settings.kubeconfig, os.environ) or _kubelets(argv)
    except Invalid as error:
        return ClusterFacts(kubelet, "", problem=str(error))
    if access is None:
        return ClusterFacts(kubelet)
    try:
        return ClusterFacts(kubelet, access.server, tuple(asyncio.run(_classes(access))))
    except (Failure, TimeoutError) as error:
        return ClusterFacts(kubelet, access.server, problem=f"{access.server}: {error or 'no answer'}")


def _kubelet() -> tuple[int, Sequence[str]]:
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "kubelet" and is_nodes_own(process.pid):
            try:
                return int(process.pid), process.cmdline()
            except psutil.Error:
                continue
    return 0, ()


def _kubelets(argv: Sequence[str]) -> Access | None:
    """Return the kubelet's own access, which may read RuntimeClasses; None where its file cannot be used as it is."""
    for word, following in pairwise([*argv, ""]):
        name, _, value = word.partition("=")
        if name == "--kubeconfig":
            try:
                return of_kubeconfig(Path(value or following))
            except Invalid:
                return None
    return None


async def _classes(access: Access) -> list[tuple[str, str]]:
    from kybernate.agent.kubernetes.api import Api

    api = Api(access)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            found, _ = await api.list(CLASSES, "")
    finally:
        await api.close()
    return [(str(one.get("metadata", {}).get("name", "")), str(one.get("handler", ""))) for one in found]
