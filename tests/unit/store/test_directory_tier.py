"""An image in a directory tier is there whole or not at all; a transfer that was cut continues where it was."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kybernate.node.failure import Failure, NoImage
from kybernate.store.errors import ImageDamaged, StoreFull
from kybernate.store.tiers import arrived as records
from kybernate.store.tiers import copying
from kybernate.store.tiers.arrived import Arrived
from kybernate.store.tiers.directory import ARRIVING, DirectoryTier
from kybernate.store.tiers.tier import Ref, Source
from kybernate.store.transfer import Transfer, TransferProgress
from kybernate_shim.checkpoint.image.verification import verify
from tests.fakes.sized_image import MIB, contents, write_sized_image

T = TypeVar("T")
REF = Ref("team-a", "web", "1")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def slow(tmp_path: Path) -> DirectoryTier:
    write_sized_image(tmp_path / "slow/team-a/web", id="1", mib=5)
    return DirectoryTier("disk", 2, tmp_path / "slow")


@pytest.fixture
def fast(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier("ram", 1, tmp_path / "fast", durable=False)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces, and what one task copies, smaller than the images of these tests."""
    monkeypatch.setattr(copying, "TASK_BYTES", MIB)
    monkeypatch.setattr("kybernate.store.tiers.directory.READ_BYTES", 1 << 18)


async def copied(source: DirectoryTier, target: DirectoryTier, transfer: Transfer | None = None) -> TransferProgress:
    transfer = transfer or Transfer()
    held = await target.receive(await source.open(REF), transfer)
    assert held.ref == REF
    return transfer.progress


def test_copy_is_the_image(slow: DirectoryTier, fast: DirectoryTier) -> None:
    progress = run(copied(slow, fast))
    assert contents(fast.root / "team-a/web") == contents(slow.root / "team-a/web")
    assert not verify(fast.root / "team-a/web")
    assert progress.done_bytes == progress.total_bytes == progress.sent_bytes > 14 * MIB
    assert (fast.root / "team-a/web/zeros.img").stat().st_blocks * 512 <= 8 * MIB
    assert [(path.stat().st_mode & 0o777, path.stat().st_uid) for path in (fast.root / "team-a/web").iterdir()] == [
        (0o600, os.geteuid())
    ] * 5


def test_image_that_is_there_is_not_copied_again(slow: DirectoryTier, fast: DirectoryTier) -> None:
    run(copied(slow, fast))
    assert run(copied(slow, fast)).sent_bytes == 0


def test_another_image_of_the_name_stays(slow: DirectoryTier, fast: DirectoryTier) -> None:
    write_sized_image(fast.root / "team-a/web", id="2", mib=1)
    before = contents(fast.root / "team-a/web")
    with pytest.raises((Failure, NoImage), match=r"has no image|another image|no copy|no tier"):
        run(copied(slow, fast))
    assert contents(fast.root / "team-a/web") == before


class Cut(Transfer):
    """Ends a transfer in its middle, in one of the ways in which transfers end."""

    def __init__(self, after: int, error: BaseException) -> None:
        super().__init__(parallel=1)
        self._left, self._error = after, error

    async def pace(self, count: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error


class Foreign:
    """An image that is read through `pour`, as from another node."""

    directory = None

    def __init__(self, inner: Source) -> None:
        self.ref, self.manifest, self.pour, self.close = inner.ref, inner.manifest, inner.pour, inner.close


@pytest.mark.parametrize("foreign", [False, True], ids=["copied", "poured"])
@pytest.mark.parametrize("error", [OSError("the disk"), asyncio.CancelledError()], ids=["error", "cancelled"])
def test_cut_transfer_continues(slow: DirectoryTier, fast: DirectoryTier, error: BaseException, foreign: bool) -> None:
    async def transferred(transfer: Transfer) -> None:
        source = await slow.open(REF)
        await fast.receive(Foreign(source) if foreign else source, transfer)

    with pytest.raises(BaseException):  # noqa: B017, PT011  # a group, where it was in a task
        run(transferred(Cut(3, error)))
    assert not (fast.root / "team-a/web").exists()
    with pytest.raises(NoImage, match=r"has no image|another image|no copy|no tier"):
        run(fast.find(REF))
    assert run(_all(fast)) == []
    again = Transfer()
    run(transferred(again))
    assert again.progress.known_bytes > 0
    assert again.progress.known_bytes + again.progress.sent_bytes == again.progress.total_bytes
    assert contents(fast.root / "team-a/web") == contents(slow.root / "team-a/web")


@pytest.mark.parametrize("first", ["copied", "poured"])
def test_cut_transfer_continues_from_a_source_of_another_kind(
    slow: DirectoryTier, fast: DirectoryTier, first: str
) -> None:
    """What is poured comes without digests, and in parts of other sizes than what is copied."""

    async def transferred(transfer: Transfer, *, foreign: bool) -> None:
        source = await slow.open(REF)
        await fast.receive(Foreign(source) if foreign else source, transfer)

    with pytest.raises((OSError, ExceptionGroup)):
        run(transferred(Cut(3, OSError("the network")), foreign=first == "poured"))
    again = Transfer()
    run(transferred(again, foreign=first == "copied"))
    assert again.progress.known_bytes > 0 or first == "poured"
    assert contents(fast.root / "team-a/web") == contents(slow.root / "team-a/web")


async def _all(tier: DirectoryTier) -> list[Ref]:
    return [held.ref async for held in tier.images()]


def test_record_of_another_boot_is_not_believed(
    slow: DirectoryTier, fast: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExceptionGroup):
        run(copied(slow, fast, Cut(3, OSError("the power"))))
    (fast.root / f"team-a/{ARRIVING}web/pages-1.img").write_bytes(b"what the disk has made of it")
    monkeypatch.setattr(records, "boot_id", lambda: "another")
    assert run(copied(slow, fast)).known_bytes == 0
    assert contents(fast.root / "team-a/web") == contents(slow.root / "team-a/web")


@pytest.mark.parametrize("foreign", [False, True], ids=["copied", "poured"])
@pytest.mark.parametrize("at", [0, 3 * MIB + 77, 5 * MIB + 6])
def test_flipped_bit_in_the_source_is_never_an_image(
    slow: DirectoryTier, fast: DirectoryTier, at: int, foreign: bool
) -> None:
    with (slow.root / "team-a/web/pages-1.img").open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))

    async def received() -> None:
        source = await slow.open(REF)
        await fast.receive(Foreign(source) if foreign else source, Transfer())

    with pytest.raises(ImageDamaged, match=r"pages-1\.img"):
        run(received())
    assert list((fast.root / "team-a").iterdir()) == []


def test_flipped_bit_in_what_had_arrived_is_not_found_by_its_record_alone(
    slow: DirectoryTier, fast: DirectoryTier
) -> None:
    """The record says what was written; what poured in is compared as a whole before it is an image."""

    async def received(transfer: Transfer) -> None:
        await fast.receive(Foreign(await slow.open(REF)), transfer)

    with pytest.raises(OSError, match="the link"):
        run(received(Cut(9, OSError("the link"))))
    part = fast.root / f"team-a/{ARRIVING}web/pages-1.img"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    with pytest.raises(ImageDamaged):
        run(received(Transfer()))
    run(received(Transfer()))  # nothing of it is believed any more
    assert not verify(fast.root / "team-a/web")


def test_quota_counts_what_is_there(slow: DirectoryTier, fast: DirectoryTier) -> None:
    small = replace(fast, quota=20 * MIB)
    run(copied(slow, small))
    write_sized_image(slow.root / "other", id="2", mib=5, namespace="")

    async def second() -> None:
        await small.receive(await slow.open(Ref("", "other", "2")), Transfer())

    with pytest.raises(StoreFull, match="quota"):
        run(second())
    assert run(small.room()).used > 14 * MIB
    run(small.remove(REF))
    run(second())
    assert run(_all(small)) == [Ref("", "other", "2")]


def test_half_a_record_ends_the_file(tmp_path: Path) -> None:
    first = Arrived(tmp_path, b"manifest", ("a", "b"))
    first.add("a", 0, 10, b"digest")
    first.add("b", 10, 20)
    first.close()
    path = tmp_path / records.NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    again = Arrived(tmp_path, b"manifest", ("a", "b"))
    assert again.continues
    assert again.has("a", 0, 10)
    assert again.digest("a", 0, 10) == b"digest"
    assert not again.has("b", 10, 20)
    again.add("b", 10, 20)
    again.close()
    assert path.read_bytes() == whole
    assert not Arrived(tmp_path, b"another manifest", ("a", "b")).has("a", 0, 10)
