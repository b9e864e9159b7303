"""How the agents of other nodes are reached: their addresses, and the certificate that this node shows them."""

from __future__ import annotations

from typing import Final

from kybernate.agent.settings import Settings
from kybernate.client.contexts import Tls
from kybernate.client.target import Endpoint
from kybernate.node.failure import Failure

PORT: Final = 7443  # of an agent whose address is not configured


def target_of_node(node: str, settings: Settings) -> Endpoint:
    """Return where the agent of a node is, and with which certificate it is called. Raises Failure."""
    tls, ca = settings.tls, settings.peers.ca or settings.tls.client_ca
    if tls.certificate is None or tls.key is None or ca is None:
        raise Failure(
            f"no certificate for the agent of node {node}",
            state="nothing was started",
            advice="set `tls.certificate`, `tls.key`, and `tls.client_ca` or `peers.ca` in agent.toml",
        )
    address = dict(settings.peers.addresses).get(node, f"{node}:{PORT}")
    return Endpoint(address, Tls(ca, tls.certificate, tls.key))
