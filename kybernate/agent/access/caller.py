"""A caller of the agent, as the kernel or a certificate describes it; no field of a message does. Without I/O."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a caller is to the agent. A caller has one of them; NONE may do nothing."""

    OPERATOR = "operator"
    READER = "reader"
    PEER = "peer"
    PROXY = "proxy"
    CONTAINER = "container"
    NONE = "none"


@dataclass(frozen=True)
class OwnContainer:
    """The container that a process belongs to, by its cgroup."""

    namespace: str  # containerd's
    id: str
    pod_namespace: str = ""
    pod: str = ""
    name: str = ""


@dataclass(frozen=True)
class Caller:
    """A process on a UNIX socket (`uid`, `pid`), of a container (`container`), or a certificate (`name`)."""

    role: Role
    uid: int | None = None
    pid: int | None = None
    name: str = ""
    container: OwnContainer | None = None

    @property
    def key(self) -> str:
        """Return what limits are counted by: container, certificate or user."""
        if self.container is not None:
            return f"container {self.container.namespace}/{self.container.id}"
        return f"certificate {self.name}" if self.name else f"uid {self.uid}"

    def __str__(self) -> str:
        if self.container is not None:
            return f"container {self.container.id} (pid {self.pid})"
        return f"{self.name} ({self.role})" if self.name else f"uid {self.uid} (pid {self.pid})"


CALLER: Final[ContextVar[Caller]] = ContextVar("caller")
