"""`python3 -m tests.lab.cluster LANE NODES DEFAULT_RUNTIME` starts a cluster in a node of the lab."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.cluster.cluster import Cluster
from tests.lab.node import NotReady


def main(argv: list[str]) -> int:
    """Start the cluster and return when pods can run in it."""
    lane, size, default_runtime = argv
    cluster = Cluster(lane, int(size), default_runtime)
    for node in cluster.nodes:
        node.configure()
    try:
        cluster.start()
    except (NotReady, OSError, AssertionError, subprocess.SubprocessError) as error:
        print(f"the cluster does not start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
