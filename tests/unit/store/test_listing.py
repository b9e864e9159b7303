"""A list that leaves something out, repeats itself or never ends is refused, whatever the service says of it."""

from __future__ import annotations

import asyncio
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


def listed(pages: Pages) -> list[str]:
    return [one.name for one in asyncio.run(whole_list(pages, "packs"))]


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

    with pytest.raises(StoreInconsistent, match="another one each of 8 times"):
        listed(pages)
