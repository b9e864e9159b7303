"""Images that are not on this node: where they are, and how they arrive for a restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kybernate.agent.settings import StoreSettings
from kybernate.agent.storage.named import to_bring
from kybernate.agent.storage.node_tiers import OBJECT, NodeTiers
from kybernate.agent.storage.replicas import Replicas
from kybernate.node.failure import Ambiguous, Failure, NoImage
from kybernate.store.errors import StoreUnreachable
from kybernate.store.in_thread import in_thread
from kybernate.store.movement.turns import Turns
from kybernate.store.policy.model import Priority
from kybernate.store.tiers.tier import Ref, Source, Tier
from kybernate.store.transfer import Transfer, TransferProgress
from kybernate.verbs.node import Elsewhere
from kybernate_shim.checkpoint.image.manifest import decode

if TYPE_CHECKING:  # libraries of the extra `store`
    from kybernate.store.streaming.copies import Copies, CopyPlace

LOOKUP_SECONDS = 60.0  # for a store that answers slowly


class Arrivals:
    """Finds and brings them. It belongs to one event loop; `find` is called from threads."""

    def __init__(
        self, tiers: NodeTiers, replicas: Replicas, turns: Turns, settings: Callable[[], StoreSettings]
    ) -> None:
        self._tiers, self._replicas, self._turns, self._settings = tiers, replicas, turns, settings
        self._loop = asyncio.get_running_loop()

    def find(self, name: str, *, stored: bool) -> Elsewhere | None:
        """Return the image that a name means, None where none is known; `stored`: in the object store. Blocks.

        What the registry does not know is looked for in the store. Raises Failure.
        """
        try:
            found = to_bring(name, self._replicas.copies_of(name), stored=stored)
        except Ambiguous:  # the store may have replaced one by the other since
            if not self._settings().url:
                raise
            found = None
        if found is not None:
            return Elsewhere(found.ref, found.row.source, [gpu.uuid for gpu in found.row.gpus])
        looking = asyncio.run_coroutine_threadsafe(self.look(name), self._loop)
        try:
            return looking.result(LOOKUP_SECONDS)
        except TimeoutError:
            looking.cancel()
            raise StoreUnreachable(f"the store has not answered for {LOOKUP_SECONDS:g} s") from None

    @asynccontextmanager
    async def in_memory(
        self, ref: Ref, restore: str, report: Callable[[TransferProgress], object], *, stored: bool
    ) -> AsyncIterator[Path]:
        """Bring an image into memory for one restore, and yield its directory when that may begin.

        The rest arrives while the block lasts; nothing is left afterwards. Raises ImageNowhere, and what the tier that
        has the image raises.
        """
        from kybernate.store.streaming.bring import arriving

        copies = await self.opened(ref, stored=stored)
        try:
            with self.transfer(report) as transfer:
                async with _memory(restore) as memory:
                    directory = memory / Path(ref.name).name
                    async with arriving(copies.coming(), directory, transfer, transient=True):
                        yield directory
        finally:
            await copies.close()

    def transfer(self, report: Callable[[TransferProgress], object]) -> AbstractContextManager[Transfer]:
        """Return a transfer that a restore waits for."""
        settings = self._settings()
        return self._turns.transfer(
            Priority.RESTORE,
            parallel=settings.parallel,
            level=settings.compression,
            bytes_per_second=settings.bytes_per_second,
            report=report,
        )

    async def look(self, name: str) -> Elsewhere | None:
        """Return the image of the object store that a name means now, and register it; None without one."""
        if not self._settings().url:
            return None

        tier = await self._tiers.object()
        try:
            source = await tier.open_named(name)
        except NoImage:
            return None
        manifest = decode(source.manifest)
        held = await tier.find(source.ref)
        await asyncio.to_thread(self._replicas.stored, OBJECT, held, source.manifest)
        return Elsewhere(source.ref, manifest.source, [gpu.uuid for gpu in manifest.gpus])

    async def opened(self, ref: Ref, *, stored: bool) -> Copies:
        """Return the copies of an image, of which the first that can be is open. Raises ImageNowhere."""
        from kybernate.store.streaming.copies import Copies

        nodes = [] if stored else await asyncio.to_thread(self._replicas.other_nodes, ref)
        copies = Copies(ref, list(self._places(ref, nodes)))
        await copies.open()
        return copies

    def _places(self, ref: Ref, nodes: Sequence[str]) -> Iterator[CopyPlace]:
        """Yield what may have an image, the nearest first."""
        from kybernate.store.streaming.copies import CopyPlace

        async def opened(tier: Callable[[], Awaitable[Tier]]) -> Source:
            return await (await tier()).open(ref)

        for node in nodes:
            yield CopyPlace(f"peer {node}", partial(opened, partial(self._tiers.peer, node)))
        if url := self._settings().url:
            title = f"{'disk' if url.startswith('file:') else OBJECT} {url}"
            yield CopyPlace(title, partial(opened, self._tiers.object))


@asynccontextmanager
async def _memory(restore: str) -> AsyncIterator[Path]:
    """Do as `memory_for`, without making the event loop wait for the kernel to free gigabytes."""
    from kybernate.store.streaming.memory import memory_for

    memory = memory_for(restore)
    try:
        directory = await in_thread(memory.__enter__)
    except OSError as error:
        raise Failure(
            f"no memory can be mounted for the image: {error}",
            state="nothing was started",
            advice=(
                "run the agent by its packaged unit, or in the host's mount namespace; or promote the image to the disk"
            ),
        ) from error
    try:
        yield directory
    finally:
        await in_thread(memory.__exit__, None, None, None)
