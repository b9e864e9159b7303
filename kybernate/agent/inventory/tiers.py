"""The places for checkpoint images in the hub: how large they are, what images use, what is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as api
from kybernate.node.failure import Failure
from kybernate.node.filesystem import space_of
from kybernate.node.images import inventory
from kybernate_shim.config import Config

FREE_SECONDS = 10.0  # between two looks at the free room, while a client follows
IMAGES_SECONDS = 600.0  # between two looks at all images, unless one is known to have changed
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True)
class Usage:
    """What images take of a place."""

    images: int = 0
    bytes: int = 0


Look = Callable[[Config], Mapping[Path, Usage]]


def usage_by_root(config: Config) -> dict[Path, Usage]:
    """Return what images take of each place, by reading their manifests; no figures where they cannot be read."""
    found: dict[Path, Usage] = {}
    try:
        images = inventory(config).images
    except Failure:
        return {}
    for one in images:
        before = found.get(one.place.root, Usage())
        found[one.place.root] = Usage(before.images + 1, before.bytes + one.bytes)
    return found


class Tiers:
    """Keeps the hub's tiers. `look` finds what images use: a registry knows it without reading them."""

    def __init__(self, hub: Hub, config: Callable[[], Config], *, look: Look = usage_by_root) -> None:
        self._hub, self._config, self._look = hub, config, look
        self._usage: Mapping[Path, Usage] = {}
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()

    def images_changed(self) -> None:
        """Look at the images soon: one was written, or removed."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the hub's tiers up to date until this is cancelled."""
        while True:
            self._changed.clear()
            await self.refresh(images=True)
            for _ in range(int(IMAGES_SECONDS / FREE_SECONDS)):
                try:
                    await asyncio.wait_for(self._changed.wait(), FREE_SECONDS)
                    break
                except TimeoutError:
                    if self._hub.wanted("tier"):
                        await self.refresh()

    async def refresh(self, *, images: bool = False) -> None:
        """Look at the places now; with `images`, at what is in them, too."""
        async with self._lock:
            config = self._config()
            if images:
                self._usage = await asyncio.to_thread(self._look, config)
            messages = await asyncio.to_thread(lambda: list(tier_messages(config, self._usage)))
            there = {message.name for message in messages}
            for gone in [tier for tier in self._hub.objects("tier") if tier.name not in there]:
                self._hub.remove(gone)
            for message in messages:
                self._hub.put(message)


def tier_messages(config: Config, usage: Mapping[Path, Usage]) -> Iterator[api.Tier]:
    """Yield the tiers: the checkpoint root is "disk", or "ram" in memory; a trusted root has its path as name."""
    root = config.checkpoint_root
    yield _message("ram" if _in_memory(root) else "disk", root, usage.get(root, Usage()))
    if config.memory_root is not None:
        yield _message("ram", config.memory_root, usage.get(config.memory_root, Usage()))
    for trusted in config.trusted_roots:
        yield _message(str(trusted), trusted, usage.get(trusted, Usage()))


def _message(name: str, path: Path, usage: Usage) -> api.Tier:
    message = api.Tier(name=name, path=str(path), used_bytes=usage.bytes, images=usage.images)
    try:
        message.capacity_bytes, message.free_bytes = space_of(path)
    except (OSError, StopIteration):  # a relative path
        pass
    return message


def _in_memory(path: Path) -> bool:
    """Return whether a path is on a file system in memory."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next((str(place) for place in (path, *path.parents) if str(place) in mounts), "/")
    return mounts.get(mount, "") in IN_MEMORY
