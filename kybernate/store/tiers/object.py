"""Images in an object store: chunks that all of them share, see docs/store-format.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from kybernate.node.failure import NoImage, Refused
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ImageDamaged
from kybernate.store.format import recipe as recipes
from kybernate.store.format.recipe import Recipe
from kybernate.store.images import StoredImage, require_same, store_files
from kybernate.store.named import named_recipe
from kybernate.store.probe import probe
from kybernate.store.tiers.directory import require_whole
from kybernate.store.tiers.tier import Held, Ref, Room, Source
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.manifest import decode


class ObjectTier:
    """The images of an open chunk store."""

    level = 3
    durable = True

    def __init__(self, store: ChunkStore, url: str, name: str = "object") -> None:
        self.name = name
        self._store = store
        self.url = url

    async def lacks(self) -> list[str]:
        """Return what the service lacks, a sentence each; raises as `probe`."""
        return await probe(self._store.objects)

    async def listed(self) -> dict[str, Ref]:
        """Return the images by their places, without reading any: what they are called is not known then."""
        found = {}
        async for stored in self._store.images():
            namespace, id = recipes.of_object(stored.name)
            found[self._place(namespace, id)] = Ref(namespace, "", id)
        return found

    async def images(self) -> AsyncIterator[Held]:
        async for recipe in self._store.recipes():
            yield self._held(recipe)

    async def find(self, ref: Ref) -> Held:
        return self._held(await self._recipe(ref))

    async def open(self, ref: Ref) -> Source:
        recipe = await self._recipe(ref)
        return StoredImage(self._store, recipe, replace(_ref_of(recipe), name=ref.name or recipe.name))

    async def open_named(self, name: str) -> Source:
        """Open what an id, a name or NAMESPACE/NAME means. Raises NoImage and Ambiguous."""
        recipe = await named_recipe(self._store, name)
        return StoredImage(self._store, recipe, _ref_of(recipe))

    async def receive(self, source: Source, transfer: Transfer) -> Held:
        """Store an image that is in a directory. Raises Refused for any other one: it is copied to the node first."""
        if source.directory is None:
            raise Refused(
                f"{source.ref} is not on this node, and only what is can be stored", advice="copy it to the disk first"
            )
        manifest = decode(source.manifest)
        try:
            known = await self._recipe(Ref(manifest.source.namespace, "", manifest.id))
        except NoImage:
            pass
        else:
            require_same(known, source.manifest)
            return self._held(known)
        await asyncio.to_thread(require_whole, source.directory, manifest)
        name = source.ref.name
        return self._held(await store_files(self._store, source.directory, source.manifest, name, transfer))

    async def discard(self, ref: Ref) -> None:
        """Leave it to a collection: what was sent is of use to the next upload."""

    async def verify(self, ref: Ref) -> None:
        """Look whether every chunk is in a pack that exists; none is read. Raises ImageDamaged."""
        recipe = await self._recipe(ref)
        packs = {stored.name.rpartition("/")[2] async for stored in self._store.objects.list("packs")}
        await self._store.refresh()
        missing = sum(self._store.index.find(id, packs.__contains__) is None for id in recipe.chunks())
        if missing:
            raise ImageDamaged(f"{self.url}: {ref}: {missing} chunks are missing")

    async def remove(self, ref: Ref) -> None:
        await self._store.remove(ref.namespace, ref.id)

    async def room(self) -> Room:
        return Room(used=sum([stored.size async for stored in self._store.objects.list("packs")]))

    async def _recipe(self, ref: Ref) -> Recipe:
        try:
            if ref.id:
                return await self._store.recipe(ref.namespace, ref.id)
            return await self._newest(ref)
        except NoImage as error:
            raise NoImage(f"tier {self.name} has no image {ref or ref.id}") from error

    async def _newest(self, ref: Ref) -> Recipe:
        """Return the newest image of a name: an object store keeps several."""
        named = [recipe async for recipe in self._store.recipes(ref.namespace) if recipe.name == ref.name]
        if not named:
            raise NoImage(f"no image {ref}")
        return max(named, key=lambda recipe: recipe.created)

    def _held(self, recipe: Recipe) -> Held:
        return Held(_ref_of(recipe), recipe.size, self._place(recipe.namespace, recipe.id))

    def _place(self, namespace: str, id: str) -> str:
        return f"{self.url}#{namespace or '-'}/{id}"


def _ref_of(recipe: Recipe) -> Ref:
    return Ref(recipe.namespace, recipe.name, recipe.id)
