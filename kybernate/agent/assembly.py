"""The agent: the list of its parts, in the order in which they start, and what all of them need."""

from __future__ import annotations

import asyncio
import platform
import socket
from collections.abc import Mapping
from typing import Any, TypeVar

from kybernate.agent.notify import Notifier
from kybernate.agent.part import Part, Parts
from kybernate.agent.parts.images import Images
from kybernate.agent.parts.node import Events, Known, Records
from kybernate.agent.parts.seats import Seats
from kybernate.agent.parts.sockets import Sockets
from kybernate.agent.parts.work import InCluster, Operations, Policy, Rooms, Telemetry
from kybernate.agent.settings import LiveSettings, Settings, StoreSettings
from kybernate.agent.tier_settings import Tiers
from kybernate.node.failure import Failure
from kybernate_shim.config import Config
from kybernate_shim.live_config import LiveConfig

P = TypeVar("P", bound=Part)


class Agent:
    """Made in the event loop. `given` are the sockets that systemd has opened."""

    def __init__(self, live: LiveSettings, log: Any, given: Mapping[str, socket.socket], notifier: Notifier) -> None:
        self.live, self.log, self.given, self.notifier = live, log, given, notifier
        self.name = live.current.node_name or platform.node()
        self.loop = asyncio.get_running_loop()
        self._shim_config = LiveConfig(log)
        self._parts: list[Part] = []
        self.records = self._part(Records(self))
        self.events = self._part(Events(self))
        self.known = self._part(Known(self))
        self.images = self._part(Images(self))
        self.rooms = self._part(Rooms(self))
        self.operations = self._part(Operations(self))
        self.telemetry = self._part(Telemetry(self))
        self.cluster = self._part(InCluster(self))
        self.policy = self._part(Policy(self))
        self.seats = self._part(Seats(self))
        self.sockets = self._part(Sockets(self))
        self.parts = Parts(self._parts, log)

    async def reload(self) -> None:
        """Read the settings again; what cannot be used is in the log, an event and the node's findings."""
        before = self.live.current
        self.live.reload()
        if self.live.problem:
            self.log.error("settings.not_used", error=self.live.problem, state="the former settings stay in use")
            self.events.log.note("settings.refused", "error", self.live.problem)
            return
        for warning in self.live.current.warnings:
            self.log.warning("settings.ignored", warning=warning)
        pending = ", ".join(self.live.pending)
        if pending:
            self.log.warning("settings.deferred", keys=self.live.pending, advice="restart the agent")
        self.log.info("settings.reloaded")
        await self.parts.reload(before)
        self.events.log.note("settings.changed", "info", f"{self.live.path} was read", pending=pending)

    def not_applied(self, error: Failure) -> None:
        """Report settings that a part cannot use; it keeps those that it had."""
        self.log.error("settings.not_applied", error=str(error), advice=error.advice)
        self.events.log.note("settings.refused", "error", str(error))

    # ---- the settings as they are now

    def settings(self) -> Settings:
        return self.live.current

    def store_settings(self) -> StoreSettings:
        return self.live.current.store

    def tier_settings(self) -> Tiers:
        return self.live.current.tiers

    def config(self) -> Config:
        """Return the configuration of the shims."""
        return self._shim_config.read()

    def _part(self, part: P) -> P:
        self._parts.append(part)
        return part
