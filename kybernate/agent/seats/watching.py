"""Watches suspended containers for uses of their GPUs: the arena's library 20 times a second, all others once.

A program that has not called CUDA yet waits for its container's turn by a file, whose reads the node is told of. Calls
of containers that are not suspended are counted when the arbiter asks for them, where they have the library.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kybernate.agent.seats.around import Active
from kybernate.agent.seats.claims import Key
from kybernate.agent.seats.turn_files import TurnFiles
from kybernate.node.use import Calls, Container, Switches, pages_of, switches_of
from kybernate_shim.linux.threads import as_long_as_wanted

TICK_SECONDS: Final = 0.05  # between two looks at the library's words
IDLE_SECONDS: Final = 0.25  # while no container is watched
LOOK_SECONDS: Final = 1.0  # between two looks at threads, and between two reports of one use


@dataclass
class _Watched:
    container: Container
    looking: asyncio.Task[None]
    told: float = -math.inf


@dataclass
class _Counted:
    calls: Calls
    looking: asyncio.Task[None] | None = None


class UseWatch:
    """Finds out which suspended containers use CUDA. `first` returns a container's first process."""

    def __init__(self, first: Callable[[Key], int | None], turn_files: TurnFiles | None = None) -> None:
        self._first, self._turn_files = first, turn_files or TurnFiles()
        self._watched: dict[Key, _Watched] = {}
        self._counted: dict[Key, _Counted] = {}
        self._settled: dict[Key, Switches] = {}  # of those that were put to sleep on request: where their threads were

    async def run(
        self,
        suspended: Callable[[], Collection[Key]],
        used: Callable[[Key], None],
        active: Active = dict,
    ) -> None:
        """Watch until cancelled, see UseWatcher."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                self._follow(set(suspended()))
                self._follow_calls(active())
                for key, one in self._watched.items():
                    if clock() - one.told < LOOK_SECONDS:
                        continue
                    if one.container.is_used() or self._turn_files.is_awaited(key):
                        one.told = clock()
                        used(key)
                await asyncio.sleep(TICK_SECONDS if self._watched else IDLE_SECONDS)
        finally:
            self._follow(set())
            self._follow_calls({})

    def settle(self, key: Key) -> None:
        """Take calls of a container that wait now for no use: it was put to sleep on request, maybe at work."""
        self._turn_files.settle(key)
        if first := self._first(key):
            self._settled = {known: one for known, one in self._settled.items() if self._first(known)}
            self._settled[key] = switches_of(first)
        if (one := self._watched.pop(key, None)) is not None:
            one.looking.cancel()  # and watched again from now on

    def calls(self, container: Key) -> int | None:
        """Return a number that has risen if an active container has called since it was last asked for."""
        one = self._counted.get(container)
        return None if one is None else one.calls.count()

    def _follow(self, wanted: set[Key]) -> None:
        for key in self._watched.keys() - wanted:
            one = self._watched.pop(key)
            one.looking.cancel()
        for key in wanted - self._watched.keys():
            if first := self._first(key):
                container = Container(first, self._settled.get(key))
                looking = asyncio.create_task(_looking(container))
                looking.add_done_callback(lambda _, container=container: container.close())  # type: ignore[misc]
                self._watched[key] = _Watched(container, looking)

    def _follow_calls(self, active: Mapping[Key, frozenset[int]]) -> None:
        for key in self._counted.keys() - active.keys():
            one = self._counted.pop(key)
            if one.looking is not None:
                one.looking.cancel()
            one.calls.close()
        for key, processes in active.items():
            one = self._counted.setdefault(key, _Counted(Calls()))
            if processes != one.calls.processes and (one.looking is None or one.looking.done()):
                one.looking = asyncio.create_task(_open(one.calls, processes))


async def _open(calls: Calls, processes: frozenset[int]) -> None:
    calls.follow(processes, await as_long_as_wanted(lambda: pages_of(processes - calls.processes)))


async def _looking(container: Container) -> None:
    """Look once a second; a thread that a process of the container keeps from returning is left behind in the end."""
    while True:
        await as_long_as_wanted(container.look)
        await asyncio.sleep(LOOK_SECONDS)
