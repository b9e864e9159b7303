"""Which specs of Kubernetes' end-to-end tests run, and in which portions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

LABELS = ("NodeConformance", "Conformance")  # what is chosen; many specs have both

# Each portion has a cluster of its own and is chosen by the labels of its specs. Every spec is in exactly one.
_NODE = "NodeConformance && !Slow"
_REST = "Conformance && !NodeConformance && !Slow"
PORTIONS: Mapping[str, str] = MappingProxyType({
    "node": f"{_NODE} && sig-node",
    "node-others": f"{_NODE} && !sig-node",
    "api-machinery": f"{_REST} && sig-api-machinery",
    "apps": f"{_REST} && sig-apps",
    "network": f"{_REST} && sig-network",
    "others": f"{_REST} && !sig-api-machinery && !sig-apps && !sig-network",
    "slow": "(NodeConformance || Conformance) && Slow",
})  # fmt: skip


def exactly(names: Iterable[str]) -> list[str]:
    """Return an expression for each spec that matches its name alone."""
    return [re.escape(name).replace(r"\ ", " ") + "$" for name in sorted(names)]
