"""Which specs of Kubernetes' end-to-end tests run, in which portions, and which do not, with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Exclusion:
    """Specs whose names match `pattern`, a regular expression that Go and Python read alike, are not run."""

    pattern: str
    reason: str


EXCLUSIONS: tuple[Exclusion, ...] = ()


def excluded(name: str) -> Exclusion | None:
    """Return why a spec is not run; None where it is."""
    return next((one for one in EXCLUSIONS if re.search(one.pattern, name)), None)


def exactly(names: Iterable[str]) -> list[str]:
    """Return an expression for each spec that matches its name alone."""
    return [re.escape(name).replace(r"\ ", " ") + "$" for name in sorted(names)]
