"""Which image of a store a name means."""

from __future__ import annotations

from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.errors import ImageNotStored
from kybernate.store.format.recipe import Recipe


class NotInStore(Failure):
    """The store has no image of that name, or several."""

    advice = "`kybernate store ls` lists what it has"
    several = False


async def named_recipe(store: ChunkStore, name: str) -> Recipe:
    """Return the recipe that a name means: an id, a name, or NAMESPACE/NAME. Raises NotInStore."""
    found = []
    namespace = name.partition("/")[0] if "/" in name else ""  # of all others, nothing is read
    async for stored in store.images(namespace):
        try:
            recipe = await store.recipe_of(stored.name)
        except ImageNotStored:
            continue  # removed since it was listed
        if name in (recipe.id, recipe.name, f"{recipe.namespace}/{recipe.name}"):
            found.append(recipe)
    if not found:
        raise NotInStore(f"the store has no image of the name {name!r}")
    if len(found) > 1:
        listed = "\n".join(f"  {one.id}  {one.namespace}/{one.name}" for one in found)
        error = NotInStore(f"{name!r} is the name of {len(found)} images:\n{listed}", advice="use the id")
        error.several = True
        raise error
    return found[0]
