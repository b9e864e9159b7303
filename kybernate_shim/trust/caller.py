"""The caller of the call that is being answered: kept with the task that answers it, for the audit line.

The container's author and the caller are different: a pod's annotation asks for a restore, and containerd makes the
call.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from kybernate_shim.ttrpc import Call

OWN_SERVICE: Final = "kybernate.shim.v1.Shim"
AGENT: Final = "kybernate.node.v1."  # the services of the node agent begin with it


@dataclass(frozen=True, slots=True)
class Caller:
    """A call of the shim or the node agent. `uid` and `pid` are those of the process that connected, None if unknown.

    `name` is that of the certificate or the container by which the agent identifies the caller, "" elsewhere.
    """

    service: str
    method: str
    uid: int | None = None
    pid: int | None = None
    name: str = ""

    @property
    def by(self) -> str:
        """Return the client's program: `kybernate` for our own service, `agent` for the agent's, else `containerd`."""
        if self.service.startswith(AGENT):
            return "agent"
        return "kybernate" if self.service == OWN_SERVICE else "containerd"


CALLER: Final[ContextVar[Caller | None]] = ContextVar("caller", default=None)


def called_by(call: Call) -> Caller:
    """Return who made a call, as the kernel reports it (SO_PEERCRED)."""
    if call.peer is None:
        return Caller(call.service, call.method)
    return Caller(call.service, call.method, call.peer.uid, call.peer.pid)
