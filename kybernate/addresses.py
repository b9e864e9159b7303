"""Where containerd and the agent listen, for those that look before they load what it takes to call them."""

from __future__ import annotations

from typing import Final

CONTAINERD: Final = "/run/containerd/containerd.sock"
AGENT: Final = "/run/kybernate/agent.sock"
AGENT_VARIABLE: Final = "KYBERNATE_AGENT"
