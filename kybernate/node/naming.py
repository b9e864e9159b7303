"""What the name of a checkpoint image means: one answer for the command line, the agent, the registry and the store.

A name is a place, which is a directory or the URL of a copy in a store; or one of: an id, a manifest's digest, a name,
NAMESPACE/NAME; or the beginning of an id, where none of these fits. A place means the copy that is there and no other.
Every other name means each copy that is called so, whichever kind of name it is: two images, one of which has the id of
the other for its name, are not told apart by it. What acts on one copy then refuses, and lists the places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from kybernate.node.failure import Ambiguous

SHORTEST_ID: Final = 4  # characters that may stand for an id
SHOWN: Final = 20

Item = TypeVar("Item")


@dataclass(frozen=True)
class Names:
    """What a copy of an image may be called. `words` are all of its names but for `place` and `id`."""

    place: str
    id: str
    words: frozenset[str]


def names_of(place: str, id: str, name: str, namespace: str, *others: str) -> Names:
    """Return the names of a copy that is called `name` in `namespace`, "" for none; `others` are further ones."""
    own = {name, *others} | ({f"{namespace}/{name}"} if namespace else set())
    return Names(place, id, frozenset(own - {""}))


def is_place(name: str) -> bool:
    """Return whether a name can be nothing but a directory or a URL."""
    return name.startswith("/") or "://" in name


def meant(name: str, copies: Iterable[Item], names: Callable[[Item], Names]) -> list[Item]:
    """Return those of `copies` that `name` means, in their order."""
    known = [(one, names(one)) for one in copies]
    wanted = str(Path(name)) if name.startswith("/") else name
    at = [one for one, called in known if called.place == wanted]
    if at or is_place(name):
        return at
    exactly = [one for one, called in known if name and (name == called.id or name in called.words)]
    if exactly or len(name) < SHORTEST_ID:
        return exactly
    return [one for one, called in known if called.id.startswith(name)]


def the_only(name: str, places: Sequence[str]) -> str:
    """Return the only place of what a name means. Raises Ambiguous for several of them."""
    if len(places) > 1:
        raise Ambiguous(
            f"{name!r} is the name of {len(places)} checkpoint images:\n{listed(places)}",
            state="nothing was done",
            advice="name one of them by its place",
        )
    return places[0]


def listed(places: Sequence[str]) -> str:
    """Return places for a message, one a line."""
    more = f"\n  and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return "\n".join(f"  {place}" for place in places[:SHOWN]) + more
