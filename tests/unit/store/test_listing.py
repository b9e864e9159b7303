"""A list that leaves something out, repeats itself or never ends is refused, whatever the service says of it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.store import listing
from kybernate.store.errors import StoreInconsistent
from kybernate.store.listing import Pages, whole_list
from kybernate.store.objects import Stored

NAMES = [f"packs/{number}" for number in range(7)]


def stored(names: Sequence[str]) -> list[Stored]:
    return [Stored(name, 1, 1.0) for name in names]


def service(answer: Callable[[list[str]], Sequence[Sequence[str]]], names: Sequence[str] = NAMES) -> Pages:
    """Return a service whose `answer` cuts the right names into pages, or into wrong ones."""

    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        for page in answer([name for name in names if name > after]):
            yield stored(page)

    return pages


def listed(pages: Pages, *, ordered: bool = True) -> list[str]:
    return [one.name for one in asyncio.run(whole_list(pages, "packs", ordered=ordered))]


@given(st.integers(1, 9), st.lists(st.sampled_from(NAMES), unique=True).map(sorted))
def test_list_of_any_number_of_pages_is_whole(size: int, names: list[str]) -> None:
    pages = service(lambda right: [right[begin : begin + size] for begin in range(0, len(right), size)], names)
    assert listed(pages) == names


@pytest.mark.parametrize("most", range(1, 7))
def test_list_that_was_cut_is_refused(most: int) -> None:
    with pytest.raises(StoreInconsistent, match=f"has {most} objects and not packs/{most}, which is there"):
        listed(service(lambda right: [right[:most]]))


def test_list_that_is_empty_by_mistake_is_refused() -> None:
    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        yield stored(NAMES if after else [])

    with pytest.raises(StoreInconsistent, match="has 0 objects and not packs/0, which is there"):
        listed(pages)


def test_list_that_repeats_a_page_is_refused() -> None:
    with pytest.raises(StoreInconsistent, match="has packs/0 twice"):
        listed(service(lambda right: [right[:2]] * 1000))


def test_list_that_ignores_its_end_is_whole() -> None:
    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        yield stored(NAMES)  # also where what is behind the last one was asked for

    assert listed(pages) == NAMES


def test_list_that_is_not_in_order_is_refused() -> None:
    """What is behind its last name would be little, and show nothing of what the list lacks."""
    with pytest.raises(StoreInconsistent, match="not in order: it has packs/2 after packs/6"):
        listed(service(lambda right: [[right[0], right[6], right[2]] if len(right) == 7 else right]))


def test_list_of_a_directory_has_no_order() -> None:
    assert sorted(listed(service(lambda right: [right[::-1]]), ordered=False)) == NAMES


def shuffled(right: list[str], order: random.Random) -> list[str]:
    return order.sample(right, len(right))


LIES: dict[str, Callable[[list[str], random.Random], list[str]]] = {
    "none": lambda right, _: right,
    "cut": lambda right, order: right[: order.randrange(len(right))] if right else right,
    "shuffled": shuffled,
    "a key twice": lambda right, order: sorted([*right, order.choice(right)]) if right else right,
    "a page twice": lambda right, _: right + right,
    "of others": lambda right, order: [*right, order.choice(["packs", "packs2/1", "images/1", "../packs/1", ""])],
    "all": lambda _, __: NAMES,
    "nothing": lambda _, __: [],
}


@given(st.lists(st.sampled_from(sorted(LIES)), min_size=2, max_size=24), st.randoms(use_true_random=False))
def test_no_lie_of_a_service_is_taken_for_a_whole_list(lies: list[str], order: random.Random) -> None:
    """Each answer has a lie of its own. One list is honest where it says nothing, its check another one."""
    left = itertools.chain(lies, itertools.repeat("none"))
    told: list[str] = []

    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        told.append(next(left))
        yield stored(LIES[told[-1]]([name for name in NAMES if name > after], order))

    try:
        found = listed(pages)
    except StoreInconsistent:
        assert set(told) != {"none"}
    else:
        behind_was_hidden = told[-1] in ("cut", "nothing") and told[-2] in ("cut", "nothing")
        assert found == NAMES or behind_was_hidden


def test_list_of_another_prefix_is_refused() -> None:
    with pytest.raises(StoreInconsistent, match="has packs-of-others/1, which is not below it"):
        listed(service(lambda right: [["packs/1", "packs-of-others/1"]]))


def test_list_whose_empty_pages_never_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE_SECONDS", 0.01)

    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        await asyncio.get_running_loop().create_future()  # as the client library, which passes on no empty page
        yield []

    with pytest.raises(StoreInconsistent, match="does not end"):
        listed(pages)


def test_objects_that_are_written_during_the_list_are_no_contradiction() -> None:
    there = NAMES[:3]

    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        yield stored([name for name in there if name > after])
        if not after and len(there) < 6:
            there.append(NAMES[len(there)])

    assert listed(pages) == NAMES[:6]


def test_lists_that_never_agree_are_refused() -> None:
    there = ["packs/00"]

    async def pages(prefix: str, after: str) -> AsyncIterator[Sequence[Stored]]:
        yield stored([name for name in there if name > after])
        if not after:
            there.append(f"packs/{len(there):02}")

    with pytest.raises(StoreInconsistent, match="different in each of 8 attempts"):
        listed(pages)
