"""The network of a node's pods, by the plugins of Debian's package."""

from __future__ import annotations

import json


def network(pods: str) -> str:
    """Return the CNI configuration of a node whose pods have addresses of the range `pods`.

    Each pod has a link of its own to the node, and not a port of a bridge: what one pod sends to another by way of a
    Service then passes through the node in both directions, which translates the addresses.
    """
    return json.dumps({
        "cniVersion": "1.0.0", "name": "lab",
        "plugins": [
            {
                "type": "ptp",
                "ipam": {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]},
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }, indent=2)  # fmt: skip
