"""Which image of a store a name means."""

from __future__ import annotations

from kybernate.node.failure import Failure
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format import recipe as recipes
from kybernate.store.format.recipe import Recipe


class NotInStore(Failure):
    """The store has no image of that name, or several."""

    advice = "`kybernate store ls` lists what it has"
    several = False


async def named_object(store: ChunkStore, name: str) -> tuple[str, str]:
    """Return the object of the recipe that a name means, and its image's name.

    The name of an object means itself, also where it holds no recipe. Raises NotInStore.
    """
    if name.startswith(f"{recipes.PREFIX}/"):
        async for stored in store.images():
            if stored.name == name:
                return name, name
    recipe = await named_recipe(store, name)
    return recipes.object_name(recipe.namespace, recipe.id), recipe.name


async def named_recipe(store: ChunkStore, name: str) -> Recipe:
    """Return the recipe that a name means: an id, a name, or NAMESPACE/NAME. Raises NotInStore."""
    broken: dict[str, str] = {}
    namespace = name.partition("/")[0] if "/" in name else ""  # of all others, nothing is read
    found = [
        recipe
        async for recipe in store.recipes(namespace, broken=broken.__setitem__)
        if name in (recipe.id, recipe.name, f"{recipe.namespace}/{recipe.name}")
    ]
    if not found:
        others = "".join(f"; {object!r} cannot be read: {why}" for object, why in sorted(broken.items()))
        raise NotInStore(f"the store has no image of the name {name!r}{others}")
    if len(found) > 1:
        listed = "\n".join(f"  {one.id}  {one.namespace}/{one.name}" for one in found)
        error = NotInStore(f"{name!r} is the name of {len(found)} images:\n{listed}", advice="use the id")
        error.several = True
        raise error
    return found[0]
