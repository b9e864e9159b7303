"""Keeps the registry and the hub's images in agreement with the node's images.

The images are the truth. All of them are read when the agent starts, and one whenever an operation or an event is about
it. A registry that does not answer stops no checkpoint and no restore: it is brought up to date when it answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kybernate.agent.service.images import image_message
from kybernate.agent.storage.node_tiers import OBJECT
from kybernate.agent.storage.store_index import Indexed
from kybernate.agent.watch.hub import Hub
from kybernate.messages import agent_pb2 as wire
from kybernate.node.failure import Failure, Missing
from kybernate.registry.artefacts import Artefacts
from kybernate.registry.catalogue import Catalogue, every
from kybernate.registry.model import Filter, ImageRow
from kybernate.store.errors import ImageDamaged
from kybernate_shim.config import Config

RETRY_SECONDS: Final = 30.0
AGAIN_SECONDS: Final = 3600.0  # a look at all images, for what others have changed
CHANGING: Final = frozenset({"checkpoint", "restore", "import", "delete", "verify"})  # verbs, and what they change
MOST_DAMAGE: Final = 1000  # letters of what a verification has found
MOST_SHOWN: Final = 10_000  # images in the hub: watchers get them all


@dataclass
class Registry:
    """The catalogue, opened when it is first needed, and again after a failure to."""

    url: str
    node: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _catalogue: Catalogue | None = None

    def __call__(self) -> Catalogue:
        """Return the catalogue. Blocks; raises what opening one does, such as Unavailable."""
        with self._lock:
            if self._catalogue is None:
                self._catalogue = Catalogue(self.url, node=self.node)
            return self._catalogue

    def close(self) -> None:
        with self._lock:
            if self._catalogue is not None:
                self._catalogue.close()
                self._catalogue = None

    def is_pinned(self, directory: Path) -> bool:
        """Return whether the image in a directory is pinned. Raises Failure where the registry does not answer."""
        try:
            return self().get(str(directory)).annotations.pinned
        except Missing:
            return False


class Registrar:
    """Works while `run` runs. `changed` is called after each change of an image."""

    def __init__(
        self, registry: Registry, hub: Hub, config: Callable[[], Config], log: Any, *, changed: Callable[[], object]
    ) -> None:
        self._registry, self._hub, self._config, self._log = registry, hub, config, log
        self._changed = changed
        # Without a directory: an image that was restored from elsewhere.
        self._queue: asyncio.Queue[tuple[Path | None, wire.Operation | None]] = asyncio.Queue()

    def ended(self, operation: wire.Operation) -> None:
        """Look at the image of an operation that has ended."""
        if operation.verb in CHANGING and operation.image.startswith("/"):
            self._queue.put_nowait((Path(operation.result.path or operation.image), operation))
        elif operation.verb == "restore" and operation.state == wire.SUCCEEDED:
            self._queue.put_nowait((None, operation))

    def heard(self, event: wire.Event) -> None:
        """Look at the image that an event is about: the command line and pods make images without the agent."""
        if event.image.startswith("/") and not event.operation:
            self._queue.put_nowait((Path(event.image), None))

    def look_at(self, directory: Path) -> None:
        """Look at a directory in which an image has appeared, or from which one was removed."""
        self._queue.put_nowait((directory, None))

    async def run(self) -> None:
        """Register all images, then each that changes, until this is cancelled."""
        while not await self._all():  # noqa: ASYNC110  # no event says that a database answers again
            await asyncio.sleep(RETRY_SECONDS)
        while True:
            try:
                async with asyncio.timeout(AGAIN_SECONDS):
                    directory, operation = await self._queue.get()
            except TimeoutError:
                await self._all()
            else:
                await self._one(directory, operation)

    async def look_at_store(self, index: Callable[[], Awaitable[Indexed]]) -> None:
        """Bring what is registered of the object store up to date. A store that is away changes nothing."""
        try:
            found = await index()
        except (Failure, OSError, ImportError) as error:
            self._log.warning("store.not_listed", error=str(error))
            return
        if not (found.added or found.removed or found.unreadable):
            return
        self._log.info(
            "store.listed", added=len(found.added), removed=len(found.removed), unreadable=dict(found.unreadable)
        )
        for row in found.added:
            self._hub.put(image_message(row))
        for image in list(self._hub.objects("image")) if found.removed else ():
            await self._look_again(image, set(found.removed))
        self._changed()

    async def _look_again(self, image: wire.Image, removed: Set[str]) -> None:
        """Show an image as the registry has it, where a copy of it was removed from the store."""
        if not any(replica.place in removed for replica in image.replicas):
            return
        try:
            self._hub.put(image_message(await asyncio.to_thread(self._registry().get, image.manifest_digest)))
        except Missing:
            self._hub.remove(image)

    async def _all(self) -> bool:
        try:
            outcome, rows = await asyncio.to_thread(self._rebuilt)
        except Exception as error:  # noqa: BLE001  # whatever it is, the agent continues without
            self._failed(error)
            return False
        self._show({image.id or image.name: image for image in map(image_message, rows)})
        self._log.info("registry.updated", images=outcome.images, damaged=outcome.damaged)
        return True

    async def _one(self, directory: Path | None, operation: wire.Operation | None) -> None:
        try:
            row = await asyncio.to_thread(self._registered, directory, operation)
        except Exception as error:  # noqa: BLE001  # the same
            self._failed(error, image=str(directory))
            return
        if row is not None:
            self._hub.put(image_message(row))
        else:
            for image in self._hub.objects("image"):
                if any(replica.place == str(directory) for replica in image.replicas):
                    self._hub.remove(image)
        self._changed()

    def _rebuilt(self) -> tuple[Any, tuple[ImageRow, ...]]:
        catalogue = self._registry()
        outcome = catalogue.rebuild(Artefacts(self._config(), self._registry.node))
        here, stored = Filter(node=self._registry.node), Filter(tier=OBJECT)
        rows = {row.key: row for wanted in (here, stored) for row in islice(every(catalogue, wanted), MOST_SHOWN)}
        return outcome, tuple(islice(rows.values(), MOST_SHOWN))

    def _registered(self, directory: Path | None, operation: wire.Operation | None) -> ImageRow | None:
        """Bring the rows of one image up to date; return it, None where it is gone."""
        catalogue = self._registry()
        if directory is None:
            assert operation is not None
            return self._restored(catalogue, operation)
        found = Artefacts(self._config(), self._registry.node).look(directory)
        if found is None:
            catalogue.drop_replica(str(directory))
            return None
        row = catalogue.add(found.row)
        if operation is None:
            return row
        if operation.verb == "verify" and operation.error.type == ImageDamaged.__name__:
            return catalogue.checked(str(directory), operation.error.message[:MOST_DAMAGE])
        if operation.state != wire.SUCCEEDED:
            return row
        if operation.verb == "restore":
            return catalogue.used(str(directory), _seconds(operation))
        if operation.verb == "verify":
            return catalogue.checked(str(directory))
        return row

    def _restored(self, catalogue: Catalogue, operation: wire.Operation) -> ImageRow:
        """Note the use of an image that came from elsewhere. Copies that were here are gone, or it had not."""
        artefacts = Artefacts(self._config(), self._registry.node)
        for replica in catalogue.get(operation.image).replicas:
            if replica.node == self._registry.node and artefacts.look(Path(replica.place)) is None:
                catalogue.drop_replica(replica.place)
        return catalogue.used(operation.image, _seconds(operation))

    def _show(self, images: Mapping[str, wire.Image]) -> None:
        for known in self._hub.objects("image"):
            if (known.id or known.name) not in images:
                self._hub.remove(known)
        for image in images.values():
            self._hub.put(image)
        self._changed()

    def _failed(self, error: Exception, **about: str) -> None:
        defect = not isinstance(error, Failure)
        self._log.error("registry.failed", error=repr(error) if defect else str(error), exc_info=defect, **about)


def _seconds(operation: wire.Operation) -> float:
    return (operation.ended.ToNanoseconds() - operation.started.ToNanoseconds()) / 1e9
