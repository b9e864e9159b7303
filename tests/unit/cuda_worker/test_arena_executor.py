"""What a move answers where the program does something meanwhile; the moves themselves need a driver."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from unittest.mock import create_autospec

import pytest

from kybernate_shim.arena.control import Block, BlockState, Verb
from kybernate_shim.arena.memory import Memory
from kybernate_shim.arena.refusals import ArenaRefusal
from kybernate_shim.cuda_worker import offload, program_blocks
from kybernate_shim.cuda_worker.arena_executor import ArenaExecutor
from kybernate_shim.cuda_worker.copier import ArenaCopier
from kybernate_shim.worker_protocol.cuda_jobs import Warm

NOBODYS = 1 << 20  # a descriptor that is not open


@dataclass
class Page:
    """The control page of a program that has one block and closes its descriptor as soon as it is shared."""

    pid: int = 0
    asked: list[Verb] = field(default_factory=list)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, verb: Verb, **_: float) -> None:
        self.asked.append(verb)

    def blocks(self, first: int = 0, count: int = 1) -> list[Block]:
        state = BlockState.SHARED if Verb.SHARE in self.asked else BlockState.HERE
        return [Block(0, 0x1000, 2 << 20, state, False, 0, NOBODYS)]


def test_memory_that_is_freed_under_a_look_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page()

    monkeypatch.setattr(program_blocks, "control_of", lambda pid: page)
    memory = create_autospec(Memory, instance=True)
    answer = ArenaExecutor(memory, create_autospec(ArenaCopier, capacity=1 << 30)).warm(Warm(os.getpid(), 10))
    assert answer.refusal is ArenaRefusal.BUSY
    assert page.asked == [Verb.SHARE, Verb.CLOSE, Verb.FORGET]


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [
        ([], []),
        ([5], [1]),
        ([1] * 12, [2, 4, 6, 8, 10, 12]),
        ([1] * 7, [2, 4, 6, 7]),
        ([100, 1, 1, 1], [1, 4]),
        ([1, 1, 1, 100], [4]),
    ],
)
def test_blocks_are_grouped_by_their_size(sizes: list[int], ends: list[int]) -> None:
    groups = list(offload.groups(sizes, offload.GROUPS))
    assert [group.stop for group in groups] == ends
    assert [group.start for group in groups] == [0, *ends][: len(ends)]
    assert len(groups) <= offload.GROUPS
