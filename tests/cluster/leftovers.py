"""What pods leave behind on a node of the cluster, looked for in the node itself: `python -m tests.cluster.leftovers`.

before = snapshot(node)
…
assert_nothing_left(node, before)
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.lab.cluster.nodes import Node
from tests.lab.namespaces import CHECKOUT
from tests.system.ctr import eventually
from tests.system.leftovers import Snapshot

PODS = Path("/var/lib/kubelet/pods")
Found = dict[str, list[str]]


def snapshot(node: Node) -> Found:
    """Return the names of what a pod could leave, by kind."""
    found: Found = json.loads(node.run("env", f"PYTHONPATH={CHECKOUT}", sys.executable, "-m", __name__))
    return found


def assert_nothing_left(node: Node, before: Found, *, seconds: float = 60) -> None:
    """Wait until the node has nothing that it had not before; AssertionError names what stays."""

    def gone() -> bool:
        now = snapshot(node)
        added = {kind: sorted(set(now[kind]) - set(before[kind])) for kind in now}
        added = {kind: names for kind, names in added.items() if names}
        assert not added, f"left over: {added}"
        return True

    eventually(gone, seconds=seconds, pause=1)


def main() -> int:
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    volumes = [path.name for path in PODS.iterdir()] if PODS.is_dir() else []
    found = {kind: sorted(names) for kind, names in asdict(Snapshot.take()).items()}
    print(json.dumps({**found, "links": sorted(links), "volumes": sorted(volumes)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
