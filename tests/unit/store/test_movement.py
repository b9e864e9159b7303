"""An image comes from wherever it is whole, the last good copy stays, and who is waited for goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate.node.failure import Failure
from kybernate.store.errors import StoreFull
from kybernate.store.movement.moving import ImageNowhere, bring, evict
from kybernate.store.movement.turns import Turns
from kybernate.store.policy.model import Priority
from kybernate.store.tiers.directory import DirectoryTier
from kybernate.store.tiers.tier import Ref
from kybernate.store.transfer import Transfer
from kybernate_shim.checkpoint.image.verification import verify
from tests.fakes.sized_image import MIB, contents, write_sized_image

T = TypeVar("T")
REF = Ref("team-a", "web", "1")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[DirectoryTier, DirectoryTier, DirectoryTier]:
    """Return a disk with the image, another one with a copy of it, and an empty memory."""
    one, other, memory = (
        DirectoryTier(name, level, tmp_path / name, durable=level > 1)
        for name, level in (("disk", 2), ("second", 2), ("ram", 1))
    )
    write_sized_image(one.root / "team-a/web", id="1", mib=4)
    run(bring(REF, [one], other, Transfer()))
    return one, other, memory


def damage(tier: DirectoryTier) -> None:
    with (tier.root / "team-a/web/pages-1.img").open("r+b") as stream:
        stream.seek(2 * MIB)
        stream.write(b"not what was written")


def test_second_source_has_what_the_first_has_not(tiers: tuple[DirectoryTier, DirectoryTier, DirectoryTier]) -> None:
    one, other, memory = tiers
    damage(one)
    transfer = Transfer()
    held, name = run(bring(REF, [one, other], memory, transfer))
    assert (held.ref, name) == (REF, "second")
    assert transfer.progress.done_bytes == transfer.progress.total_bytes == held.bytes
    assert not verify(memory.root / "team-a/web")
    assert contents(memory.root / "team-a/web") == contents(other.root / "team-a/web")


def test_image_without_a_good_copy_is_nowhere_and_each_is_named(
    tiers: tuple[DirectoryTier, DirectoryTier, DirectoryTier],
) -> None:
    one, other, memory = tiers
    damage(one)
    run(other.remove(REF))
    with pytest.raises(ImageNowhere, match=r"(?s)disk: pages-1\.img has other content.*second: tier second has no"):
        run(bring(REF, [one, other], memory, Transfer()))
    assert not (memory.root / "team-a/web").exists()


def test_limit_is_for_what_goes_over_a_network(tiers: tuple[DirectoryTier, DirectoryTier, DirectoryTier]) -> None:
    one, other, memory = tiers
    limits: list[float] = []

    class Noting(Transfer):
        async def pace(self, count: int) -> None:
            limits.append(self.bytes_per_second)

    damage(one)
    remote = replace(other, level=3)
    run(bring(REF, [one, remote], memory, Noting(), remote_bytes_per_second=7.0))
    assert {0.0, 7.0} == set(limits)
    assert limits == sorted(limits)  # the damaged one is tried first, without a limit


def test_full_target_is_not_the_sources_fault(tiers: tuple[DirectoryTier, DirectoryTier, DirectoryTier]) -> None:
    one, other, memory = tiers
    with pytest.raises(StoreFull):
        run(bring(REF, [one, other], replace(memory, quota=MIB), Transfer()))


def test_last_good_copy_is_never_evicted(tiers: tuple[DirectoryTier, DirectoryTier, DirectoryTier]) -> None:
    one, other, memory = tiers
    damage(one)
    with pytest.raises(Failure, match=r"(?s)disk: .*pages-1\.img"):
        run(evict(REF, other, [one, memory]))
    assert not verify(other.root / "team-a/web")
    assert run(evict(REF, one, [memory, other])) == "second"
    assert not (one.root / "team-a/web").exists()
    run(bring(REF, [other], memory, Transfer()))
    with pytest.raises(Failure, match="no other tier has a good copy"):  # the copy in memory goes with the power
        run(evict(REF, other, [one, memory]))
    assert run(evict(REF, memory, [one, other])) == "second"


def test_restore_overtakes_a_demotion() -> None:
    async def scenario() -> list[str]:
        turns, order = Turns(), list[str]()

        async def move(name: str, priority: Priority, count: int) -> None:
            with turns.transfer(priority) as transfer:
                for number in range(count):
                    await transfer.pace(1)
                    order.append(f"{name}{number}")
                    await asyncio.sleep(0)

        slow = asyncio.create_task(move("d", Priority.DEMOTION, 4))
        while len(order) < 2:  # noqa: ASYNC110  # of steps that the other task takes
            await asyncio.sleep(0)
        waited = [asyncio.create_task(move(name, Priority.RESTORE, 3)) for name in "rs"]
        await asyncio.gather(slow, *waited)
        return order

    order = run(scenario())
    assert sorted(order) == ["d0", "d1", "d2", "d3", "r0", "r1", "r2", "s0", "s1", "s2"]
    begin = order.index("r0")
    assert {name[0] for name in order[begin : begin + 6]} == {"r", "s"}  # without a pause
    assert begin < 4


def test_failed_transfer_lets_others_move() -> None:
    async def scenario() -> None:
        turns = Turns()
        with pytest.raises(ZeroDivisionError), turns.transfer(Priority.RESTORE):
            raise ZeroDivisionError
        with turns.transfer(Priority.DEMOTION) as transfer:
            await asyncio.wait_for(transfer.pace(1), 5)

    run(scenario())
