"""What a move answers where the program does something meanwhile; the moves themselves need a driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast
from unittest.mock import create_autospec

import pytest

from kybernate_shim.cuda.arena import moves
from kybernate_shim.cuda.arena.control import Block, BlockState, Verb
from kybernate_shim.cuda.arena.memory import Memory
from kybernate_shim.cuda.arena.moves import CODES, Mover
from kybernate_shim.cuda.arena.transfer import Transfer

NOBODYS = 1 << 20  # a descriptor that is not open


@dataclass
class Page:
    """The control page of a program that has one block and closes its descriptor as soon as it is shared."""

    asked: list[Verb] = field(default_factory=list)

    def ask(self, verb: Verb, **_: float) -> None:
        self.asked.append(verb)

    def blocks(self) -> list[Block]:
        state = BlockState.SHARED if Verb.SHARE in self.asked else BlockState.HERE
        return [Block(0, 0x1000, 2 << 20, state, False, 0, NOBODYS)]


def test_memory_that_is_freed_under_a_look_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page()

    @contextmanager
    def opened(pid: int) -> Iterator[tuple[Page, int]]:
        pidfd = os.pidfd_open(pid)
        try:
            yield page, pidfd
        finally:
            os.close(pidfd)

    monkeypatch.setattr(moves, "_opened", opened)
    answer = Mover(cast("Memory", None), create_autospec(Transfer)).warm(os.getpid())
    assert (answer.code, answer.name) == (CODES["ARENA_BUSY"], "ARENA_BUSY")
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
    groups = list(moves._groups(sizes, moves.GROUPS))
    assert [group.stop for group in groups] == ends
    assert [group.start for group in groups] == [0, *ends][: len(ends)]
    assert len(groups) <= moves.GROUPS
