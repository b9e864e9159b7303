"""Switches models between HAProxy's own backends and the activator, and says what HAProxy has in flight."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from pathlib import Path
from typing import Final

from kybernate.proxy.engine import Engine
from kybernate.proxy.haproxy.child import Child, HaproxyUnusable, find_binary, max_connections
from kybernate.proxy.haproxy.generated import (
    ACTIVATOR,
    Places,
    backend_of,
    direct_models,
    generated,
    map_entries,
    written_map,
)
from kybernate.proxy.haproxy.runtime_api import Traffic
from kybernate.proxy.keys import read_keys
from kybernate.proxy.settings import Settings
from kybernate.proxy.tracing import Export, export_of
from kybernate_shim.logs import Log

LOOK_SECONDS: Final = 0.5  # between two looks at what is in flight
NOTHING: Final = Traffic(0, 0)
SETTLE_SECONDS: Final = 0.01  # in which a request that has read the map before a change is counted by its backend


class HaproxyPlane:
    """A Gate of the engine. Use: `start`, then the engine with it, then `watch`."""

    def __init__(self, settings: Settings, log: Log, export: Export | None = None) -> None:
        self.settings, self._log, self._export = settings, log, export
        self.places = Places(settings.haproxy.state)
        self.direct = {model.name: model for model in direct_models(settings)}
        self._wanted = dict.fromkeys(self.direct, ACTIVATOR)
        self._totals: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._left: set[str] = set()  # models that an earlier HAProxy, which is leaving, had in flight
        self._child: Child | None = None

    def prepare(self) -> Path:
        """Make the directory, and return the path of the activator's socket, where none is any more."""
        write_files(self.settings, self.places)
        self.places.activator.unlink(missing_ok=True)
        return self.places.activator

    def inner_names(self) -> dict[str, str]:
        """Return the backends of models that the activator reaches through HAProxy."""
        return {name: backend_of(name) for name in self.direct}

    @property
    def started(self) -> bool:
        return self._child is not None

    async def start(self) -> None:
        """Have HAProxy serve; the activator's socket must be listened on. Raises HaproxyUnusable."""
        binary = find_binary(self.settings.haproxy.binary)
        self._child = Child(binary, self.places, self._log, self._restore)
        await self._hand_over()
        names = {key for model in self.direct.values() for key in map_entries(self.settings, model)}
        await self.child.api.keep_in_map(self.places.map, names)  # of an earlier proxy's, which may have had others
        for name in self.direct:
            await self._set(name, ACTIVATOR)

    async def change(self, settings: Settings) -> None:
        """Serve by other routes and keys: a new HAProxy gets the sockets, and the old one ends with its streams.

        Raises HaproxyUnusable; then nothing has changed.
        """
        before, self.settings = self.settings, settings
        try:
            write_files(settings, self.places)
            await self._hand_over()
        except HaproxyUnusable:
            self.settings = before
            write_files(before, self.places)
            raise
        await self._set_all()

    async def _hand_over(self) -> None:
        """Have HAProxy serve as the settings say; what an earlier one has in flight then is known while that lives."""
        try:
            found = await self.child.api.traffic()
        except OSError:
            found = {}  # there is none
        await self.child.start(configuration(self.settings, self.places, self._export))
        if self.child.leaving:
            self._left |= {name for name in self.direct if found.get(backend_of(name), NOTHING).in_flight}

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    async def open(self, name: str) -> None:
        if name in self.direct:
            await self._set(name, backend_of(name))

    async def close(self, name: str) -> None:
        if name in self.direct:
            await self._set(name, ACTIVATOR)
            await asyncio.sleep(SETTLE_SECONDS)

    async def in_flight(self, name: str) -> int:
        found = await self._child.api.traffic() if self._child is not None else {}
        return found.get(backend_of(name), NOTHING).in_flight + self._leaving(name)

    def _leaving(self, name: str) -> int:
        """Return 1 while an earlier HAProxy may have streams of a model: it says no more how many."""
        if not self._left or not self.child.leaving:
            self._left.clear()
        return int(name in self._left)

    async def limit(self, name: str, most: int) -> int:
        if name not in self.direct:
            return 0
        self._limits[name] = most
        await self.child.api.set_limit(backend_of(name), max(1, most))
        return (await self.child.api.traffic()).get(backend_of(name), NOTHING).running

    async def watch(self, engine: Engine) -> None:
        """Tell the engine what HAProxy passes by itself, without an end."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                found = await self.child.api.traffic()
            except OSError as error:
                self._log.debug("traffic.not_listed", error=str(error))
                continue
            for name in self.direct:
                if (traffic := found.get(backend_of(name))) is not None:
                    used = traffic.total != self._totals.get(name, traffic.total)
                    self._totals[name] = traffic.total
                    in_flight = traffic.in_flight + self._leaving(name)
                    engine.elsewhere(name, in_flight, used=used, running=traffic.running)

    async def _set(self, name: str, backend: str) -> None:
        self._wanted[name] = backend
        for key in map_entries(self.settings, self.direct[name]):
            await self.child.api.set_map(self.places.map, key, backend)

    def _restore(self) -> None:
        """Bring the map of a HAProxy that was started again to what it should be."""
        self._totals.clear()
        task = asyncio.get_running_loop().create_task(self._set_all())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _set_all(self) -> None:
        for name, most in list(self._limits.items()):
            await self.limit(name, most)
        for name, backend in list(self._wanted.items()):
            await self._set(name, backend)


def write_files(settings: Settings, places: Places) -> None:
    """Write what the configuration names: the map, and the hashes of keys."""
    places.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    places.map.write_text(written_map(settings))
    for number, route in enumerate(settings.routes):
        if route.keys:
            places.keys(number).write_text("".join(f"{one}\n" for one in read_keys(route.keys)))


def configuration(settings: Settings, places: Places, export: Export | None) -> str:
    """Return what HAProxy is started with. It reads keys once, so that other keys are another configuration."""
    numbers = [number for number, route in enumerate(settings.routes) if route.keys]
    keys = "".join(f"# keys {number}: {_digest(places.keys(number))}\n" for number in numbers)
    return generated(settings, places, max_connections(), export) + keys


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def printed(settings: Settings) -> str:
    """Return the configuration, for people to read."""
    return generated(settings, Places(settings.haproxy.state), max_connections(), export_of(os.environ))
