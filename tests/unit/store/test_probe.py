"""What a service lacks is found by trying it, and what the trial wrote is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kybernate.store.errors import StoreDenied
from kybernate.store.objects import Stored
from kybernate.store.probe import probe
from tests.unit.store.stepped import SteppedObjects


def tried(objects: SteppedObjects, behind: float = 0.0) -> list[str]:
    return asyncio.run(probe(objects, clock=lambda: objects.clock + behind))


class Unconditional(SteppedObjects):
    async def create(self, name: str, content: bytes) -> bool:
        await self.put(name, content)
        return True


class Versioned(SteppedObjects):
    async def head(self, name: str) -> Stored:
        return replace(await super().head(name), version="v1")


class Locked(SteppedObjects):
    async def locked_until(self, name: str) -> float | None:
        return self.clock + 30 * 86400


class Whole(SteppedObjects):
    ranged = False


class Late(SteppedObjects):
    async def delete(self, names: Sequence[str]) -> None:
        """Nothing has happened yet."""


class ReadOnly(SteppedObjects):
    async def create(self, name: str, content: bytes) -> bool:
        raise StoreDenied("AccessDenied")


def test_service_that_has_all_is_not_mentioned_and_keeps_nothing() -> None:
    objects = SteppedObjects()
    assert tried(objects, behind=100.0) == []
    assert objects.contents == {}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unconditional, "it does not support conditional writes"),
        (Versioned, "the bucket keeps versions"),
        (Locked, "the bucket has an object lock: what is written there stays for 30 days"),
        (Whole, "answers requests for parts of objects with whole ones"),
        (Late, "its lists show what was deleted"),
        (ReadOnly, "these credentials may not write or delete: AccessDenied"),
    ],
)
def test_what_a_service_lacks_is_said(kind: type[SteppedObjects], said: str) -> None:
    (words,) = tried(kind())
    assert said in words


def test_what_others_try_at_the_same_time_is_theirs() -> None:
    objects = SteppedObjects()
    objects.contents["probe/other-0"] = (b"", objects.clock)
    assert tried(objects) == []
    assert list(objects.contents) == ["probe/other-0"]


def test_clock_that_differs_is_said() -> None:
    assert tried(SteppedObjects(), behind=400.0) == [
        "its clock and this node's differ by 400 s; from 900 on, requests are refused"
    ]


def test_what_was_found_out_before_is_said() -> None:
    objects = SteppedObjects()
    objects.lacks = {"it deletes one object per request"}
    assert tried(objects) == ["it deletes one object per request"]
