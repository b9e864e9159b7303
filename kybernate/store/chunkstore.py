"""A chunk store: images as recipes over chunks that are shared by all of them. See docs/store-format.md."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from kybernate.node.failure import NoImage
from kybernate.store import header
from kybernate.store.errors import ObjectMissing, StoreInvalid
from kybernate.store.format import pack as packs
from kybernate.store.format import recipe as recipes
from kybernate.store.format.pack import Place
from kybernate.store.format.recipe import Recipe
from kybernate.store.index import ChunkIndex
from kybernate.store.keys import StoreKey
from kybernate.store.objects import Objects, Stored

PARALLEL = 8
Broken = Callable[[str, str], object]  # gets the name of an object, and why it cannot be read


class ChunkStore:
    """An open store. One for each task: its index is not shared between threads."""

    def __init__(self, objects: Objects, key: StoreKey, index: Path | str = ":memory:") -> None:
        self.objects = objects
        self.key = key
        self.index = ChunkIndex(index, key)
        self.id = ""
        self._refreshing = asyncio.Lock()

    async def open(self, *, create: bool = False) -> ChunkStore:
        """Check that it is a store of this key, or make it one. Raises StoreInvalid, StoreUnreachable, StoreDenied."""
        try:
            self.id = await (header.make if create else header.check)(self.objects, self.key)
        except ObjectMissing as error:
            raise StoreInvalid(
                "there is no store at this place",
                advice="`kybernate store init` makes one",
                state="nothing was changed",
            ) from error
        return self

    def close(self) -> None:
        self.index.close()

    async def refresh(self) -> None:
        """Take over what others have added to the index."""
        async with self._refreshing:
            await self.index.refresh(self.objects)

    async def reload(self) -> None:
        """Read the index again, as after a collection."""
        async with self._refreshing:
            self.index.clear()
            await self.index.refresh(self.objects)

    # -- images

    async def images(self, namespace: str = "") -> AsyncIterator[Stored]:
        """Yield the objects of the recipes, of one namespace or of all."""
        prefix = f"{recipes.PREFIX}/{namespace}" if namespace else recipes.PREFIX
        async for found in self.objects.list(prefix):
            yield found

    async def recipe(self, namespace: str, id: str) -> Recipe:
        """Return an image's recipe. Raises NoImage, and StoreInvalid where it was changed."""
        return await self.recipe_of(recipes.object_name(namespace, id))

    async def recipe_of(self, name: str) -> Recipe:
        """Return the recipe in an object; raises as `recipe`."""
        try:
            content = await self.objects.get(name, most=recipes.MOST_BYTES)
        except ObjectMissing as error:
            raise NoImage(f"the store has no image {name.removeprefix(recipes.PREFIX + '/')}") from error
        found = await asyncio.to_thread(recipes.decode, self.key, content)
        if recipes.object_name(found.namespace, found.id) != name:
            raise StoreInvalid(f"{name} holds the recipe of another image, {found.namespace}/{found.id}")
        return found

    async def recipes(self, namespace: str = "", *, broken: Broken = lambda name, why: None) -> AsyncIterator[Recipe]:
        """Yield the recipes of one namespace or of all; `broken` gets the objects that hold none, and why."""
        async for stored in self.images(namespace):
            try:
                recipe = await self.recipe_of(stored.name)
            except NoImage:
                continue  # removed since it was listed
            except StoreInvalid as error:
                broken(stored.name, str(error))
            else:
                yield recipe

    async def remove(self, namespace: str, id: str) -> None:
        """Remove an image; its chunks stay until a collection."""
        await self.objects.delete([recipes.object_name(namespace, id)])

    # -- packs

    async def table_of(self, pack: str) -> tuple[Place, ...]:
        """Return what a pack says of itself. Raises ObjectMissing and StoreInvalid."""
        name = packs.object_name(pack)
        size = (await self.objects.head(name)).size
        end = await self.objects.get_range(name, max(0, size - packs.FOOTER.size), packs.FOOTER.size)
        footer = packs.read_footer(size, bytes(end))
        table = await self.objects.get_range(name, footer.start, footer.length) if footer.length else b""
        return packs.read_table(self.key, pack, bytes(table), footer)

    async def packs(self) -> dict[str, Stored]:
        """Return the packs that are there, by their names."""
        return {packs.name_of(stored.name): stored async for stored in self.objects.list(packs.PREFIX)}

    async def complete(self, there: Iterable[str]) -> set[str]:
        """Take over the tables of packs that no index names, and return those that cannot be read.

        An upload that died has not indexed its packs, and a list of indexes may lack one that is being replaced.
        """
        async with self._refreshing:
            unread, known = set[str](), self.index.packs()
            lacking = [pack for pack in there if pack not in known]
            for begin in range(0, len(lacking), PARALLEL):
                part = lacking[begin : begin + PARALLEL]
                found = await asyncio.gather(*map(self.table_of, part), return_exceptions=True)
                for pack, table in zip(part, found, strict=True):
                    match table:
                        case ObjectMissing():
                            continue  # deleted since it was listed
                        case StoreInvalid():
                            unread.add(pack)
                        case BaseException():
                            raise table
                        case _:
                            self.index.add([(pack, table)])
        return unread

    async def now(self) -> float:
        """Return the service's time, in seconds since 1970."""
        name = f"clock/{uuid.uuid4()}"
        await self.objects.put(name, b"")
        try:
            return (await self.objects.head(name)).modified
        finally:
            await self.objects.delete([name])
