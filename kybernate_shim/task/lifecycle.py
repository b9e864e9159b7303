"""The life of a container and of its processes, as one table.

"restorable" is a container created from a checkpoint: the runtime does not know it before Start. "pausing" lasts while
the runtime freezes the container. "held" is frozen by a checkpoint, until it is released or ended; it is reported to
containerd as running, since for containerd only its own calls pause a container. An exec uses the same table and never
reaches the rows of pausing.
"""

from __future__ import annotations

from kybernate_shim.errors import Refused

MOVES: dict[str, dict[str, str]] = {
    "created": {
        "start": "running", "exec": "created", "update": "created", "kill": "created", "exit": "stopped",
        "delete": "deleted",
    },
    "restorable": {"start": "running", "kill": "restorable", "exit": "stopped", "delete": "deleted"},
    "running": {
        "pause": "pausing", "exec": "running", "update": "running", "checkpoint": "running", "suspend": "running",
        "park": "running",
        "hold": "held", "kill": "running", "exit": "stopped",
    },
    "held": {"release": "running", "update": "held", "kill": "held", "exit": "stopped"},
    "pausing": {"paused": "paused", "not paused": "running", "kill": "pausing", "exit": "stopped"},
    "paused": {
        "resume": "running", "update": "paused", "checkpoint": "paused", "park": "paused", "kill": "paused",
        "exit": "stopped",
    },
    "stopped": {"delete": "deleted"},
    "deleted": {},
}  # fmt: skip


class InvalidMove(Refused):
    """The container is in a state that does not allow the call; nothing was changed."""


def after(state: str, move: str) -> str:
    """Return the state that follows `move`. Raises InvalidMove where the table has none."""
    try:
        return MOVES[state][move]
    except KeyError:
        remedy = "; `kybernate release` lets it run on" if state == "held" else ""
        raise InvalidMove(f"cannot {move} a {state} container{remedy}") from None
