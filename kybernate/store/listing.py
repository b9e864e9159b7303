"""Complete lists: what a service leaves out of a list would be taken for gone, and lead to deletions.

Services have been seen to cut a list after its first page and to call it whole, to repeat a page endlessly, and to list
what was not asked for. So a list is compared with what is behind its last name, which another request asks for. That
is the end of the list only where names come in order, as S3, GCS and Azure promise: another order of theirs is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from kybernate.store.errors import StoreInconsistent

if TYPE_CHECKING:
    from kybernate.store.objects import Stored

PAGE_SECONDS = 180.0  # a service that repeats empty pages never ends; a slow one has answered several requests by then
ROUNDS = 8  # lists of one prefix, each because of objects that were written during the one before

Pages = Callable[[str, str], AsyncIterator[Sequence["Stored"]]]  # of a prefix, after a name; "" for all


async def whole_list(pages: Pages, prefix: str, *, ordered: bool = True) -> list[Stored]:
    """Return the objects below `prefix`. An object that is there from the begin to the end is in the list.

    `ordered` says that the service promises names in the order of their UTF-8 bytes, as all but directories do.
    Raises StoreInconsistent where the service's lists contradict each other.
    """
    seen = frozenset[str]()  # behind the end of the list before this one
    for _ in range(ROUNDS):
        found = await _listed(pages, prefix, ordered)
        behind = frozenset(await _listed(pages, prefix, ordered, after=max(found, default=prefix)))
        lacking = behind - found.keys()
        if lost := lacking & seen:
            raise StoreInconsistent(
                f"the list of {prefix} is cut: it has {len(found)} objects and not {min(lost)}, which is there"
            )
        if not lacking:
            return list(found.values())
        seen = lacking  # written during the list: the next one must have them
    raise StoreInconsistent(f"the list of {prefix} was different in each of {ROUNDS} attempts")


async def _listed(pages: Pages, prefix: str, ordered: bool, *, after: str = "") -> dict[str, Stored]:
    """Return the objects of one list, by their names."""
    found: dict[str, Stored] = {}
    last = ""
    stream = aiter(pages(prefix, after))
    while (page := await _page(stream, prefix)) is not None:
        for one in page:
            if one.name in found:
                raise StoreInconsistent(f"the list of {prefix} has {one.name} twice, and would not end")
            if not one.name.startswith(f"{prefix}/"):
                raise StoreInconsistent(f"the list of {prefix} has {one.name}, which is not below it")
            if ordered and one.name.encode() < last.encode():
                raise StoreInconsistent(
                    f"the list of {prefix} is not in order: it has {one.name} after {last}, and may lack others"
                )
            found[one.name] = one
            last = one.name
    return found


async def _page(stream: AsyncIterator[Sequence[Stored]], prefix: str) -> Sequence[Stored] | None:
    """Return the next page; None after the last one."""
    try:
        async with asyncio.timeout(PAGE_SECONDS):
            return await anext(stream, None)
    except TimeoutError as error:
        raise StoreInconsistent(f"the list of {prefix} does not end: no page came in {PAGE_SECONDS:g} s") from error
