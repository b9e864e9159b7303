"""The turns of a former run of the agent, by its journal, so that the order of waiting seats outlives it.

Without it, all that wait would ask at the same time once their use is found, and the last of them would never have a
turn on a node whose agent ends more often than all seats have had theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kybernate.agent.operations.store import Wanted
from kybernate.agent.seats.claims import Key
from kybernate.node.failure import Failure
from kybernate.seats.model import NEVER
from kybernate.verbs.model import Operation, State

AT_WORK: Final = "kybernate.io/at-work"  # label of an operation by which a container leaves that asks for its next turn
LEAVE, COME = frozenset({"sleep", "suspend"}), frozenset({"wake", "resume"})
MOST: Final = 30  # operations of a container that are looked at, the newest


class Journal(Protocol):
    """The engine."""

    async def list(self, wanted: Wanted) -> Sequence[Operation]: ...


@dataclass(frozen=True)
class Former:
    """A container's last move: since when it has been active, or has not, and when it asked for this turn or the next.

    `asked` is NEVER where it asks for none.
    """

    active: bool
    since: float
    asked: float = NEVER


async def former_turns(journal: Journal, keys: Iterable[Key]) -> Mapping[Key, Former]:
    """Return the last move of each container of which the journal has one."""
    found: dict[Key, Former] = {}
    for key in keys:
        try:
            last = last_move(key, await journal.list(Wanted(container=key[1], limit=MOST)))
        except Failure:
            break  # they ask again by their use
        if last is not None:
            found[key] = last
    return found


def last_move(key: Key, operations: Iterable[Operation]) -> Former | None:
    """Return a container's last move by its operations, the newest first; one that came has ended."""
    for one in operations:
        if one.target.namespace != key[0] or one.state not in (State.RUNNING, State.SUCCEEDED):
            continue
        leaves, comes = one.verb in LEAVE or one.verb == "swap", one.verb in COME
        if one.target.container != key[1]:
            leaves, comes = False, one.verb == "swap" and one.target.other == key[1]
        if leaves:
            return Former(False, one.ended or one.created, one.created if AT_WORK in one.labels else NEVER)
        if comes and one.state == State.SUCCEEDED:
            return Former(True, one.ended or one.created, one.created)
    return None
