"""The places of checkpoint images on this node: room, and whether they can be written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kybernate.agent.settings import Settings
from kybernate.node import room
from kybernate.node.finding import HealthFinding
from kybernate.node.room import Room, room_of
from kybernate_shim.config import Config


def gather(config: Config, settings: Settings) -> list[Room]:
    """Look at the directories of tiers and operations."""
    places = [("tier disk", config.checkpoint_root), ("work directory", config.work_root)]
    if config.memory_root is not None:
        places.insert(0, ("tier ram", config.memory_root))
    places.append(("agent's state", settings.state_directory))
    return [room_of(name, path) for name, path in places]


def findings(rooms: Sequence[Room]) -> Iterator[HealthFinding]:
    """Yield one finding for each directory."""
    return room.findings(rooms)
