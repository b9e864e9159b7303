"""Images that shims ask for, because a container names one that is not on the node: they arrive while it is restored.

A container's author chooses the name. It is looked up in the container's own namespace alone; the image is brought to
the place where the shim looks for it, if a key of this node has signed it and the disk has room below its watermark.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kybernate.agent.storage.arrivals import Arrivals
from kybernate.node.failure import Failure, NoImage, Refused
from kybernate.node.trusted import known_keys, ring_of, signature_of
from kybernate.store.errors import StoreFull
from kybernate.store.movement.moving import ImageNowhere
from kybernate.store.streaming.left import remove_left
from kybernate.store.tiers.tier import Ref, Tier
from kybernate.verbs.node import Elsewhere
from kybernate_shim.checkpoint.image.locate import NAME, NAMESPACE
from kybernate_shim.checkpoint.image.manifest import Manifest, decode
from kybernate_shim.checkpoint.image.store import Image
from kybernate_shim.config import Config
from kybernate_shim.messages import fetch_pb2 as wire
from kybernate_shim.ttrpc import Call, Code, Method, RpcError, Services

if TYPE_CHECKING:  # libraries of the extra `store`
    from kybernate.store.streaming.copies import Copies

SERVICE: Final = "kybernate.images.v1.Images"
MOST: Final = 8  # images that arrive for shims at the same time
MOST_OF_ONE: Final = 2  # of one namespace
MOST_SECOND: Final = 2  # of namespaces that have one already; so the places are not those of four namespaces
MOST_WAITING: Final = 64  # for a place, in the order in which they came


@dataclass
class _Fetch:
    """An image that arrives: `begun` is set when its restore may begin, `bytes` when they are known."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    bytes: int = 0
    task: asyncio.Task[None] | None = None


class Fetches:
    """Answers shims. `changed` gets each directory in which an image has appeared.

    `disk` returns the tier that images come to, and the share of it above which none is brought.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        config: Callable[[], Config],
        disk: Callable[[], tuple[Tier, float]],
        changed: Callable[[Path], object],
        log: Any,
    ) -> None:
        self._arrivals, self._config, self._disk = arrivals, config, disk
        self._changed, self._log = changed, log
        self._running: dict[tuple[str, str], _Fetch] = {}
        self._places, self._second = asyncio.Semaphore(MOST), asyncio.Semaphore(MOST_SECOND)

    def services(self) -> Services:
        """Return what is served."""
        return {SERVICE: {"Fetch": Method(wire.FetchRequest, self._answer)}}

    async def close(self) -> None:
        """End what arrives. Restores of it fail, and nothing is left."""
        tasks = [fetch.task for fetch in self._running.values() if fetch.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def fetch(self, namespace: str, name: str) -> Path:
        """Bring an image, and return its directory when its restore may begin; the rest arrives afterwards.

        Raises NoImage, Refused, StoreFull, Failure, and what the tier that has it raises.
        """
        if not NAME.fullmatch(name) or (namespace and not NAMESPACE.fullmatch(namespace)):
            raise NoImage(f"{name[:300]!r} is not the name of an image")
        fetch = self._running.get((namespace, name)) or self._begin(namespace, name)
        assert fetch.task is not None
        begun = asyncio.create_task(fetch.begun.wait())
        try:
            await asyncio.wait({fetch.task, begun}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if fetch.task.done():
            fetch.task.result()
        return self._place(namespace, name)

    def _begin(self, namespace: str, name: str) -> _Fetch:
        busy = Counter(other for other, _ in self._running)
        if len(self._running) >= MOST + MOST_WAITING or busy[namespace] >= MOST_OF_ONE:
            raise Failure(
                f"{busy[namespace]} images of {namespace or 'no namespace'} arrive already",
                advice="the container is created again by its client; until then some of them have arrived",
            )
        fetch = self._running[namespace, name] = _Fetch()
        fetch.task = asyncio.create_task(self._in_turn(namespace, name, fetch, second=busy[namespace] > 0))
        fetch.task.add_done_callback(lambda task: self._ended(namespace, name, task))
        return fetch

    def _ended(self, namespace: str, name: str, task: asyncio.Task[None]) -> None:
        del self._running[namespace, name]
        about = {"namespace": namespace, "name": name}
        if task.cancelled():
            self._log.warning("image.not_fetched", **about, error="the agent was stopped")
        elif error := task.exception():
            self._log.warning("image.not_fetched", **about, error=str(error))
        else:
            self._log.info("image.fetched", **about)

    async def _in_turn(self, namespace: str, name: str, fetch: _Fetch, *, second: bool) -> None:
        """Bring it when there is a place: a namespace that has none waits for no other's second image."""
        async with self._second if second else nullcontext(), self._places:
            await self._bring(namespace, name, fetch)

    async def _bring(self, namespace: str, name: str, fetch: _Fetch) -> None:
        from kybernate.store.streaming.bring import bring

        loop, directory = asyncio.get_running_loop(), self._place(namespace, name)
        copies = await self._opened(namespace, name)
        try:
            manifest = decode(copies.manifest)
            await asyncio.to_thread(self._require_trusted, copies, manifest, namespace)
            fetch.bytes = sum(file.size for file in manifest.stored_files)
            await self._require_room()
            await asyncio.to_thread(remove_left, directory)
            with self._arrivals.transfer(lambda progress: None) as transfer:
                ready = lambda: loop.call_soon_threadsafe(fetch.begun.set)  # noqa: E731  # from a thread of the transfer
                await bring(copies.coming(), directory, transfer, transient=False, ready=ready)
        finally:
            await copies.close()
        self._changed(directory)

    async def _opened(self, namespace: str, name: str) -> Copies:
        """Open the image of exactly that namespace and name."""
        wanted = f"{namespace}/{name}" if namespace else name
        found = await asyncio.to_thread(self._arrivals.find, wanted, stored=False)
        try:
            return await self._arrivals.opened(_exactly(found, namespace, name), stored=False)
        except ImageNowhere:  # it was replaced since the registry heard of it
            found = await self._arrivals.look(wanted)
            return await self._arrivals.opened(_exactly(found, namespace, name), stored=True)

    def _require_trusted(self, copies: Copies, manifest: Manifest, namespace: str) -> None:
        """Raise Refused for what its shim would refuse. That decides again, by what has come."""
        if manifest.source.namespace != namespace:
            raise Refused(f"{copies.ref} is an image of namespace {manifest.source.namespace!r}")
        image = Image(Path(copies.ref.path), manifest, content=copies.manifest)
        signed = signature_of(image, ring_of(known_keys(self._config())))
        if namespace and signed.key is None:
            raise Refused(f"{copies.ref}: {signed.reason}")

    async def _require_room(self) -> None:
        """Raise StoreFull where all that arrives would fill the disk, or the images' quota, above its watermark."""
        tier, high = self._disk()
        room, coming = await tier.room(), sum(fetch.bytes for fetch in self._running.values())
        if room.capacity - room.free + coming > high * room.capacity:
            raise StoreFull(
                f"images that arrive need {coming} bytes, which would fill tier {tier.name} above {high:.0%}",
                advice="evict images, or raise the tier's quota",
            )

    def _place(self, namespace: str, name: str) -> Path:
        return self._config().checkpoint_root / namespace / name

    async def _answer(self, request: wire.FetchRequest, call: Call) -> wire.FetchResponse:
        self._log.info(
            "image.wanted", namespace=request.namespace, name=request.name[:300], container=request.container[:300]
        )
        try:
            return wire.FetchResponse(path=str(await self.fetch(request.namespace, request.name)))
        except NoImage as error:
            raise RpcError(Code.NOT_FOUND, str(error)) from error
        except (Failure, OSError) as error:
            raise RpcError(Code.FAILED_PRECONDITION, str(error)) from error


def _exactly(found: Elsewhere | None, namespace: str, name: str) -> Ref:
    """Return the image, if it is of exactly that namespace and name. Raises NoImage."""
    if found is None or (found.ref.namespace, found.ref.name) != (namespace, name):
        raise NoImage(f"no tier has an image {namespace}/{name}" if namespace else f"no tier has an image {name}")
    return found.ref
