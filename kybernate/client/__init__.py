"""The Python client of the node agent: checkpoint, suspend, move and watch the containers of a node.

    from kybernate.client import Agent

    with Agent() as agent:
        operation = agent.checkpoint("team-a/web-0", exit=True)
        for state in operation.follow():
            print(state.progress.step, state.progress.done_bytes)
        agent.restore(operation.result().path).result(timeout=60)

`Agent` blocks, `AsyncAgent` has the same calls as coroutines. Messages are those of `kybernate.node.v1`, see
docs/api.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kybernate.client.agent import Agent, Operation
    from kybernate.client.asynchronous import AsyncAgent, AsyncOperation
    from kybernate.client.contexts import Tls
    from kybernate.client.errors import (
        AgentRefused,
        AgentUnreachable,
        NotFinished,
        OperationCancelled,
        OperationFailed,
    )
    from kybernate.client.target import DEFAULT_SOCKET

__all__ = [
    "DEFAULT_SOCKET",
    "Agent",
    "AgentRefused",
    "AgentUnreachable",
    "AsyncAgent",
    "AsyncOperation",
    "NotFinished",
    "Operation",
    "OperationCancelled",
    "OperationFailed",
    "Tls",
]

# Where each name is from: a program that blocks loads nothing for coroutines, nor the reverse.
_MODULES = {
    "agent": ("Agent", "Operation"),
    "asynchronous": ("AsyncAgent", "AsyncOperation"),
    "errors": ("AgentRefused", "AgentUnreachable", "NotFinished", "OperationCancelled", "OperationFailed"),
    "target": ("DEFAULT_SOCKET", "Tls"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"kybernate.client.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
