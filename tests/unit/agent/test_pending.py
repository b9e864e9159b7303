"""Which connections give way to newer ones: the oldest of their address, and of all."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.agent.pending import Pending
from kybernate.node.failure import Refused


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 6), st.integers(1, 12))
def test_newest_of_each_address_and_of_all_have_the_places(keys: list[str], limit: int, most: int) -> None:
    async def main() -> None:
        pending = Pending(most)
        lost: list[int] = []

        async def wait(number: int, key: str) -> None:
            try:
                async with pending.one(key, limit, 600):
                    await asyncio.Event().wait()
            except Refused:
                lost.append(number)

        tasks = []
        kept: list[int] = []
        for number, key in enumerate(keys):
            tasks.append(asyncio.create_task(wait(number, key)))
            await asyncio.sleep(0)
            same = [other for other in kept if keys[other] == key]
            gone = same[: max(0, len(same) + 1 - limit)]
            rest = [other for other in kept if other not in gone]
            kept = [*rest[max(0, len(rest) + 1 - most) :], number]
        while len(lost) < len(keys) - len(kept):  # noqa: ASYNC110  # it is the tasks that take their turns
            await asyncio.sleep(0.001)
        assert sorted({*range(len(keys))} - {*lost}) == kept
        assert all(count <= limit for count in Counter(keys[number] for number in kept).values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pending._since == {}  # nothing is left of them

    asyncio.run(main())


def test_what_takes_too_long_loses_its_place() -> None:
    async def main() -> None:
        pending = Pending()
        with pytest.raises(Refused, match="had not ended within"):
            async with pending.one("a", 1, 0.001):
                await asyncio.Event().wait()
        async with pending.one("a", 1, 600):
            pass

    asyncio.run(main())
