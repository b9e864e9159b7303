"""Claims on GPUs: who is alone there, who counts what, and when it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kybernate_shim.gpu.claims import ROOM, claimed
from kybernate_shim.gpu.helper_answers import NodeGpu

GPU, OTHER = "GPU-a", "GPU-b"


def node(free: int | None) -> NodeGpu:
    return NodeGpu(GPU, "H200", 100, free, False)


async def cannot_begin(needed: Mapping[str, int], directory: Path) -> bool:
    """Return whether a claim has to wait for another one that is alone."""

    async def begin() -> None:
        async with claimed(needed, directory=directory):
            pass

    begun = asyncio.create_task(begin())
    for _ in range(20):  # of its own steps
        await asyncio.sleep(0)
    waits = not begun.done()
    begun.cancel()
    await asyncio.wait([begun])
    return waits


def test_claim_is_alone_on_its_gpus_until_it_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with claimed({GPU: 10}, directory=tmp_path) as one:
            assert await cannot_begin({GPU: 1}, tmp_path)
            assert await cannot_begin({OTHER: 1, GPU: 1}, tmp_path)
            assert not await cannot_begin({OTHER: 1}, tmp_path)
            one.end()
            async with claimed({GPU: 5}, directory=tmp_path) as two:
                assert two.others() == {}

    asyncio.run(main())
    assert list((tmp_path / ROOM).iterdir()) == []


def test_claim_counts_for_others_after_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            claimed({GPU: 10, OTHER: 1}, alone_seconds=0, directory=tmp_path) as one,
            claimed({GPU: 5}, directory=tmp_path) as two,
        ):
            assert two.others() == {GPU: 10, OTHER: 1}
            assert two.left([node(30), node(4), node(None)]) == [node(20), node(0), node(None)]
            one.end()
            assert two.others() == {}

    asyncio.run(main())


def test_claim_without_a_deadline_is_alone_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with claimed({GPU: 10}, alone_seconds=None, directory=tmp_path):
            assert await cannot_begin({GPU: 5}, tmp_path)

    asyncio.run(main())


def test_later_claim_counts_for_an_earlier_one_once_it_is_granted(tmp_path: Path) -> None:
    """Both wait for room: the earlier one gets it. The later one has seen room for both: it takes that."""

    async def main() -> None:
        async with (
            claimed({GPU: 10}, alone_seconds=0, directory=tmp_path) as one,
            claimed({GPU: 5}, alone_seconds=0, directory=tmp_path) as two,
        ):
            assert (one.others(), two.others()) == ({}, {GPU: 10})
            two.grant()
            assert (one.others(), two.others()) == ({GPU: 5}, {GPU: 10})

    asyncio.run(main())


HOLDS = """
import asyncio, sys
from pathlib import Path
from kybernate_shim.gpu.claims import claimed
async def hold():
    async with claimed({"GPU-a": 10}, directory=Path(sys.argv[1])) as claim:
        claim.share()
        print("claimed", flush=True)
        sys.stdin.read()
asyncio.run(hold())
"""


def test_claim_ends_with_its_process(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLDS, str(tmp_path)]

    async def main(child: subprocess.Popen[bytes]) -> None:
        async with claimed({GPU: 5}, alone_seconds=0, directory=tmp_path) as mine:
            assert mine.others() == {GPU: 10}
            child.kill()
            child.wait()
            assert mine.others() == {}

    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"claimed\n"
            asyncio.run(main(child))
        finally:
            child.kill()
    assert list((tmp_path / ROOM).iterdir()) == []


@pytest.mark.parametrize("needed", [{}, {GPU: 0}])
def test_claim_of_nothing_counts_for_nobody(tmp_path: Path, needed: dict[str, int]) -> None:
    async def main() -> None:
        async with (
            claimed(needed, alone_seconds=0, directory=tmp_path),
            claimed({GPU: 5}, directory=tmp_path) as mine,
        ):
            assert mine.left([node(30)]) == [node(30)]

    asyncio.run(main())
