"""All looks at a node, in the order in which a container meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kybernate.agent.settings import DEFAULT_PATH, Settings
from kybernate.doctor import agent, cluster, registry, seats, store
from kybernate.node import health, room
from kybernate.node.finding import HealthFinding, looked
from kybernate.node.room import Room, room_of
from kybernate_shim.config import Config, ConfigInvalid

Look = Callable[[], Iterator[HealthFinding]]


def examine(*, fix: bool = False) -> list[HealthFinding]:
    """Look at the node, the agent, store, tiers, registry and cluster; no look is left out because another failed.

    With `fix`, what `kybernate.node.health` can repair is repaired.
    """
    found = health.examine(fix=fix)
    try:
        config, settings = Config.load(), Settings.load()
    except ConfigInvalid as error:
        return [*found, *_unusable(error)]
    looks: tuple[tuple[str, Look], ...] = (
        ("tiers", lambda: room.findings(_rooms(config, settings))),
        ("agent", lambda: agent.findings(agent.gather(settings))),
        ("store", lambda: store.findings(store.gather(settings.store, agent.pid_of_service()))),
        ("registry", lambda: registry.findings(registry.gather(settings.registry))),
        ("seats", lambda: seats.findings(seats.gather(settings.seats))),
        ("cluster", lambda: cluster.findings(cluster.gather(settings.kubernetes))),
    )
    for subject, look in looks:
        found += looked(subject, partial(_settled, look))
    return found


def _rooms(config: Config, settings: Settings) -> list[Room]:
    """Look at the directories of tiers and operations: their room, and whether they can be written to."""
    places = [("tier disk", config.checkpoint_root), ("work directory", config.work_root)]
    if config.memory_root is not None:
        places.insert(0, ("tier ram", config.memory_root))
    places.append(("agent's state", settings.state_directory))
    return [room_of(name, path) for name, path in places]


def _settled(look: Look) -> Iterator[HealthFinding]:
    yield from look()


def _unusable(error: ConfigInvalid) -> Iterator[HealthFinding]:
    if str(DEFAULT_PATH) in str(error):  # health has named shim.toml
        kept = "the agent keeps its previous settings, and does not start again with these"
        yield HealthFinding("agent's settings", "bad", f"{error}; {kept}", f"correct {DEFAULT_PATH}")
