"""Notices each operation that ends in this run of the agent, once. Without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kybernate.messages import agent_pb2 as wire

FINAL: Final = frozenset({wire.SUCCEEDED, wire.FAILED, wire.CANCELLED})


class Ended:
    """Hands an operation that has ended to each of `hears`. Those that an earlier run had ended are not counted again:
    of them, the first message is the last one."""

    def __init__(self, hears: Iterable[Callable[[wire.Operation], object]]) -> None:
        self._hears = list(hears)
        self._active: set[str] = set()

    def hear(self, hear: Callable[[wire.Operation], object]) -> None:
        """Hand operations that end from now on to one more."""
        self._hears.append(hear)

    def __call__(self, operation: wire.Operation) -> None:
        if operation.state not in FINAL:
            self._active.add(operation.id)
        elif operation.id in self._active:
            self._active.discard(operation.id)
            for hear in self._hears:
                hear(operation)
