"""Which image of a store a name means, as kybernate/node/naming.py decides. The place of one is its recipe's object."""

from __future__ import annotations

from typing import Final

from kybernate.node.failure import Ambiguous, NoImage
from kybernate.node.naming import Names, listed, meant, names_of
from kybernate.store.chunkstore import ChunkStore
from kybernate.store.format import recipe as recipes
from kybernate.store.format.recipe import Recipe

NOT_IN_STORE_ADVICE: Final = "`kybernate store ls` lists what it has"


async def named_object(store: ChunkStore, name: str) -> tuple[str, str]:
    """Return the object of the recipe that a name means, and its image's name.

    The name of an object means itself, also where it holds no recipe. Raises NoImage and Ambiguous.
    """
    if name.startswith(f"{recipes.PREFIX}/"):
        async for stored in store.images():
            if stored.name == name:
                return name, name
    recipe = await named_recipe(store, name)
    return recipes.object_name(recipe.namespace, recipe.id), recipe.name


async def named_recipe(store: ChunkStore, name: str) -> Recipe:
    """Return the recipe that a name means. For NAMESPACE/NAME, no other namespace is read.

    Raises NoImage and Ambiguous.
    """
    broken: dict[str, str] = {}
    first, slash, rest = name.partition("/")
    if slash and first == recipes.PREFIX and "/" in rest:
        first = rest.partition("/")[0]
    known = [
        recipe
        for namespace in ((first, recipes.NO_NAMESPACE) if slash and first else ("",))
        async for recipe in store.recipes(namespace, broken=broken.__setitem__)
    ]
    found = meant(name, known, names)
    if not found:
        others = "".join(f"; {object!r} cannot be read: {why}" for object, why in sorted(broken.items()))
        raise NoImage(f"the store has no image named {name!r}{others}", advice=NOT_IN_STORE_ADVICE)
    if len(found) > 1:
        places = listed([f"{names(one).place}  {one.name}" for one in found])
        raise Ambiguous(
            f"{name!r} is the name of {len(found)} images:\n{places}",
            state="nothing was done",
            advice="name one of them by its id, or as images/NAMESPACE/ID",
        )
    return found[0]


def names(recipe: Recipe) -> Names:
    """Return what an image of a store may be called."""
    place = recipes.object_name(recipe.namespace, recipe.id)
    return names_of(place, recipe.id, recipe.name, recipe.namespace)
